"""Downloads: what is whole and checked counts, failures are said in plain words and leave nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lantern_hpu.commands import download
from lantern_hpu.errors import WeightsError
from lantern_hpu.files import file_in, sha256
from lantern_hpu.models.files.checkpoint import open_checkpoint
from lantern_hpu.models.files.names import given_path, series_of
from lantern_hpu.zoo import fetch as fetching
from lantern_hpu.zoo import find as located
from lantern_hpu.zoo import registry
from lantern_hpu.zoo.find import Located
from lantern_hpu.zoo.registry import KnownModel, entries
from tests.hub_cache import ANOLE, C2I, T2I, empty_cache
from tests.local_hub import COMMIT, LocalHub, local_hub
from tests.marks import mostly_slow

__all__ = ["empty_cache"]
Printed = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
PLACES = pytest.mark.parametrize("to", [False, True], ids=["cache", "folder"])
NAME = "c2i_B_256.pt"
ROOT = Path(__file__).parent.parent


@pytest.fixture
def hub(monkeypatch: Patch, empty_cache: Path) -> Iterator[LocalHub]:
    """Known models without known digests, and a Hub of this machine that has them, in small."""
    theirs = pytest.importorskip("huggingface_hub")
    known = {name: without_digests(entry) for name, entry in entries().items()}
    monkeypatch.setattr(registry, "entries", lambda: known)
    with local_hub(size=999) as served:
        template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
        constants = {
            "ENDPOINT": served.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_OFFLINE": False,
        }
        for name, value in constants.items():
            monkeypatch.setattr(theirs.constants, name, value)
        bars = import_module("huggingface_hub.utils")
        bars.disable_progress_bars()
        yield served
        bars.enable_progress_bars()


def without_digests(entry: KnownModel) -> KnownModel:
    parts = {role: replace(part, sha256={}) for role, part in entry.parts.items()}
    return replace(entry, parts=parts)


def place(tmp_path: Path, to: bool) -> list[str]:
    return ["--to", str(tmp_path / "here")] if to else []


def fetch(capsys: Printed, *args: str) -> str:
    assert download.main(args) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: Printed, *args: str) -> str:
    """What it says; one error, with exit code 2."""
    assert download.main(args) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("error: ") == 1
    assert len(said.strip().splitlines()) <= 2, said
    return said


def test_a_model_is_fetched_once(hub: LocalHub, capsys: Printed, monkeypatch: Patch) -> None:
    text = fetch(capsys, T2I)
    assert "11.4 GB" in text and "Apache-2.0" in text and "MIT" in text
    assert Located(entries()[T2I]).missing() == []
    assert str(Located(entries()[T2I])["target"]) in text
    hub.asked.clear()
    constants = sys.modules["huggingface_hub.constants"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "here already" in fetch(capsys, T2I) and hub.asked == []
    assert "cannot be reached" in refused(capsys, C2I)


def test_progress_is_shown(hub: LocalHub, capsys: Printed) -> None:
    import_module("huggingface_hub.utils").enable_progress_bars()
    assert download.main([C2I]) == 0
    assert "Fetching 1 files: 100%" in capsys.readouterr().err


def test_without_a_drafter(hub: LocalHub, capsys: Printed) -> None:
    assert fetch(capsys, ANOLE, "--without-drafter").strip().endswith("--method ar")
    assert Located(entries()[ANOLE]).absent["drafter"]
    assert not fetch(capsys, ANOLE).strip().endswith("--method ar")


def test_a_folder_gets_a_subfolder_for_each_part(
    hub: LocalHub, capsys: Printed, tmp_path: Path, empty_cache: Path
) -> None:
    folder = tmp_path / "models" / "t2i"
    text = fetch(capsys, T2I, "--to", str(folder))
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["drafter", located.LABEL, "target", "text", "vq"]
    assert not list(folder.rglob(".*"))
    entry = located.of_folder(folder)
    assert entry is not None and entry.name == T2I
    assert Located(entry, folder).missing() == []
    assert f"--model {folder}" in text and not empty_cache.exists()
    assert f"{folder} holds {T2I}" in refused(capsys, ANOLE, "--to", str(folder))


@PLACES
def test_a_damaged_file_is_deleted(
    hub: LocalHub, capsys: Printed, tmp_path: Path, to: bool
) -> None:
    hub.damaged = True
    said = refused(capsys, C2I, *place(tmp_path, to))
    assert NAME in said and "is corrupted" in said and "deleted" in said
    assert not list(tmp_path.rglob(f"*{NAME}")) and not list(tmp_path.rglob("blobs/*"))
    hub.damaged = False
    fetch(capsys, C2I, *place(tmp_path, to))


def test_another_version_is_refused_before_it_is_fetched(
    hub: LocalHub, capsys: Printed, monkeypatch: Patch
) -> None:
    entry = registry.entries()[C2I]
    target = replace(entry.parts["target"], sha256={NAME: "0" * 64})
    changed = replace(entry, parts={**entry.parts, "target": target})
    monkeypatch.setattr(registry, "entries", lambda: {C2I: changed})
    assert f"another {NAME} than the known one" in refused(capsys, C2I)
    assert hub.asked == []


def made(name: str, text: str) -> Exception:
    """An error of huggingface_hub as it is raised, but for the response it came with."""
    errors = pytest.importorskip("huggingface_hub.errors")
    cls = getattr(errors, name)
    error: Exception = cls.__new__(cls)
    error.args = (text,)
    return error


FAILURES: dict[str, tuple[Callable[[], BaseException], tuple[str, ...]]] = {
    "gated": (
        lambda: made("GatedRepoError", "403 Client Error.\nAccess is restricted"),
        ("terms accepted", "https://huggingface.co/FoundationVision/LlamaGen", "hf auth login"),
    ),
    "404": (lambda: made("RepositoryNotFoundError", "404 Client Error."), ("is not on the Hub",)),
    "no file": (lambda: made("RemoteEntryNotFoundError", "404"), ("a file is not in",)),
    "offline": (
        lambda: made("LocalEntryNotFoundError", "outgoing traffic has been disabled"),
        ("cannot be reached", "--to FOLDER", "--model"),
    ),
    "connection": (lambda: ConnectionError("name resolution"), ("cannot be reached",)),
    "server": (lambda: made("HfHubHTTPError", "503 Server Error"), ("refused", "503")),
    "full": (
        lambda: OSError(errno.ENOSPC, "No space left on device"),
        ("the disk is full", "--to"),
    ),
    "read-only": (lambda: OSError(errno.EROFS, "Read-only file system"), ("cannot write to",)),
    "transfer": (lambda: RuntimeError("transfer failed"), ("could not be fetched",)),
}


@PLACES
@pytest.mark.parametrize("kind", FAILURES)
def test_failures_are_said_in_plain_words_and_leave_nothing(
    hub: LocalHub, capsys: Printed, monkeypatch: Patch, tmp_path: Path, kind: str, to: bool
) -> None:
    make, words = FAILURES[kind]

    def fails(*_: object, **__: object) -> None:
        raise make()

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    said = refused(capsys, C2I, *place(tmp_path, to))
    assert all(word in said for word in words), said
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not (tmp_path / "here").exists()


def test_a_file_that_is_gone_is_named(hub: LocalHub, capsys: Printed) -> None:
    hub.files["google/flan-t5-xl"].remove("spiece.model")
    assert "google/flan-t5-xl lacks files: spiece.model" in refused(capsys, T2I)
    assert hub.asked == []


ODD_NAMES = (
    *("vae/../../../../theirs", "vae/../x", "/theirs", "vae//x", "vae/", "vae/./x", ".."),
    *("vae/a\0b", "vae/a\nb", "vae/\ud800", "vae\\..\\x", "C:/x", "vae/" + 300 * "x", "", 3),
)


@PLACES
@pytest.mark.parametrize("name", [n for n in ODD_NAMES if str(n).startswith("vae/")], ids=ascii)
def test_a_listed_name_that_leads_elsewhere_is_refused_before_anything_is_written(
    hub: LocalHub, capsys: Printed, tmp_path: Path, name: str, to: bool
) -> None:
    """A mark under such a name would empty a file, and the file itself would replace it."""
    theirs = tmp_path / "theirs"
    theirs.write_text("secret")
    hub.files["zai-org/GLM-Image"].append(name)
    said = refused(capsys, "glm-image", *place(tmp_path, to))
    assert "list of zai-org/GLM-Image is refused" in said
    assert theirs.read_text() == "secret" and hub.asked == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [theirs]


def test_only_the_listed_files_are_fetched(hub: LocalHub, capsys: Printed, tmp_path: Path) -> None:
    """Neither others of the repository, nor those that a name would match as a pattern."""
    hub.files["zai-org/GLM-Image"] += ["transformer/[a-z].bin", "transformer/b.bin", "more.bin"]
    fetch(capsys, "glm-image", "--to", str(tmp_path / "here"))
    assert {"[a-z].bin", "b.bin"} <= {Path(name).name for name in hub.asked}
    assert "more.bin" not in hub.asked


@pytest.mark.parametrize(
    "commit", ["../../../../x", "main", "c" * 39, "C" * 40, "c" * 41, "", None, 3]
)
def test_a_commit_that_is_none_is_refused_before_anything_is_written(
    hub: LocalHub, capsys: Printed, tmp_path: Path, commit: object
) -> None:
    hub.commit = commit
    assert "it names the commit" in refused(capsys, C2I)
    assert hub.asked == [] and not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("size", ["x", -1, 10**30])
def test_sizes_that_lie_are_not_counted(hub: LocalHub, capsys: Printed, size: object) -> None:
    hub.stated = size
    if size == 10**30:
        said = refused(capsys, C2I)
        assert "not enough space" in said and "needed, " in said and hub.asked == []
    else:
        fetch(capsys, C2I)


def test_names_that_others_give_lead_into_their_folder_or_are_refused(tmp_path: Path) -> None:
    """In an index of weights, in a description of files and in the Hub's cache, too."""
    for name in ODD_NAMES:
        with pytest.raises(WeightsError, match="cannot be in it"):
            file_in(tmp_path, name)
        index = {"weight_map": {"a": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        for read in (open_checkpoint, lambda folder: registry.matching_files(folder / "*")):
            if isinstance(name, str):
                with pytest.raises(WeightsError, match="cannot be in it"):
                    read(tmp_path)
    for name in ("vae/x", "a b/c", "\u00e9.safetensors", "..x", "ab:c", "x" * 255):
        assert file_in(tmp_path, name) == tmp_path / name
    store = tmp_path / "models--a--b"
    (store / "snapshots" / COMMIT).mkdir(parents=True)
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("../../x")
    with pytest.raises(WeightsError, match="cannot be in it"):
        given_path(str(store))
    assert series_of(Path("model-1-of-9999999999.safetensors")) == []  # which would fill the memory


@pytest.mark.parametrize("to", mostly_slow([False, True], False), ids=["cache", "folder"])
def test_an_interrupted_download_ends_at_once_and_is_continued(
    hub: LocalHub, tmp_path: Path, to: bool
) -> None:
    """Files that are whole stay, and what was only begun is gone once the model is."""
    hub.size = hub.stated = 1 << 20  # a second and more
    words = [sys.executable, "-m", "lantern_hpu", "models", "download", ANOLE]
    words += place(tmp_path, to)
    environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
    environment |= {"HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=environment, text=True, **pipes) as running:
        while not hub.asked and running.poll() is None:
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        said = running.communicate(timeout=60)[1]
    assert running.returncode == 130 and "interrupted" in said, said
    folder = tmp_path / "here" if to else None
    assert Located(entries()[ANOLE], folder)["target"] is None
    subprocess.run(words, env=environment, check=True, capture_output=True)
    assert not Located(entries()[ANOLE], folder).missing()
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".incomplete"]
    assert not (tmp_path / "here" / fetching.STAGING).exists()


@pytest.mark.parametrize("name", ["main", "main[1]"])
def test_small_files_are_written_through_no_link_and_killed_runs_leave_none(
    tmp_path: Path, name: str
) -> None:
    """In a cache that users share another may have put a link under a name that is foreseen."""
    ref, theirs = tmp_path / name, tmp_path / "theirs"
    theirs.write_text("secret")
    (tmp_path / f"{name}.incomplete").symlink_to(theirs)
    killed, going_on, another = (
        tmp_path / f".{left}.tmp" for left in (f"{name}.1", f"{name}.2", "main1.1")
    )
    for left in (killed, going_on, another):
        left.write_text("half")
    os.utime(another, (0, 0))
    os.utime(killed, (0, 0))
    fetching.write_once(ref, "commit")
    assert theirs.read_text() == "secret" and ref.read_text() == "commit"
    assert not killed.exists() and going_on.exists() and another.exists()


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_a_file_in_the_cache_that_was_not_checked_is_checked_by_the_next_run(
    hub: LocalHub, capsys: Printed, monkeypatch: Patch, damaged: bool
) -> None:
    def killed(path: Path) -> str:
        raise KeyboardInterrupt

    entry = entries()[C2I]
    target = entry.parts["target"]
    fetch(capsys, "llamagen-c2i-l-256")  # of the same repository, which so has a `main`
    hub.damaged = damaged
    monkeypatch.setattr(fetching, "sha256", killed)
    with pytest.raises(KeyboardInterrupt):
        download.main([C2I])
    folder = located.cached_folder(target)
    assert folder is not None and target.absent(folder) == ()  # it has its final name
    assert Located(entry)["target"] is None
    assert Located(entry).absent["target"] == target.files
    monkeypatch.setattr(fetching, "sha256", sha256)
    capsys.readouterr()
    if damaged:
        assert "is corrupted" in refused(capsys, C2I)
        assert located.cached_folder(target) is None
    else:
        fetch(capsys, C2I)
        assert Located(entry)["target"] is not None
    assert located.unchecked(target.repo) == set()
    assert not (located.store(target.repo) / located.UNCHECKED).exists()


def test_without_huggingface_hub(capsys: Printed, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = refused(capsys, C2I)
    assert "huggingface_hub is not installed" in said and "lantern-hpu[models]" in said
