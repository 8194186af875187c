"""Downloads: what is whole and checked counts, failures are said in plain words and leave nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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
from tests.hub_cache import ANOLE, C2I, T2I, empty_cache, in_cache

ROOT = Path(__file__).parent.parent
COMMIT = "c" * 40
__all__ = ["empty_cache"]


class Hub:
    """A Hub with some files; what a test wants to go wrong is put into `fails`."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.files: dict[str, dict[str, bytes]] = {}
        self.fails: BaseException | None = None
        self.damaged = False
        self.asked: list[str] = []
        self.commit: Any = COMMIT
        self.size: Any = None  # of each file, if it lies

    def add(self, entry: KnownModel) -> None:
        for part in entry.parts.values():
            for spec in part.files:
                name = spec.split("|")[0]
                self.files.setdefault(part.repo, {})[name] = f"{part.repo}/{name}".encode()

    def model_info(self, repo: str, files_metadata: bool = False) -> SimpleNamespace:
        siblings = []
        for name, data in self.files[repo].items():
            lfs = SimpleNamespace(sha256=hashlib.sha256(data).hexdigest())
            size = len(data) if self.size is None else self.size
            siblings.append(SimpleNamespace(rfilename=name, size=size, lfs=lfs))
        return SimpleNamespace(siblings=siblings, sha=self.commit)

    def hf_hub_download(
        self, repo: str, name: str, revision: str, local_dir: Path | None = None
    ) -> str:
        assert revision == COMMIT
        self.asked.append(name)
        if self.fails is not None:
            raise self.fails
        data = b"cut off" if self.damaged else self.files[repo][name]
        if local_dir is None:
            if (there := located.cached(repo, name)) is not None:
                return str(there)
            folder = in_cache(self.cache, repo, name, revision=COMMIT)
            # As the library does for a file asked for by its commit
            (folder.parent.parent / "refs" / "main").unlink()
            (folder / name).resolve().write_bytes(data)
            return str(folder / name)
        local_dir.mkdir(parents=True, exist_ok=True)
        (local_dir / name).write_bytes(data)
        return str(local_dir / name)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> Hub:
    """Known models without known digests, and a Hub that has them."""
    theirs = pytest.importorskip("huggingface_hub")
    fake = Hub(empty_cache)
    known = {name: without_digests(entry) for name, entry in entries().items()}
    monkeypatch.setattr(registry, "entries", lambda: known)
    for entry in known.values():
        fake.add(entry)
    monkeypatch.setattr(theirs, "HfApi", lambda: fake)
    monkeypatch.setattr(theirs, "hf_hub_download", fake.hf_hub_download)
    return fake


def without_digests(entry: KnownModel) -> KnownModel:
    parts = {role: replace(part, sha256={}) for role, part in entry.parts.items()}
    return replace(entry, parts=parts)


def fetch(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert download.main(args) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What it says; one error, with exit code 2."""
    assert download.main(args) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("error: ") == 1
    assert len(said.strip().splitlines()) <= 2, said
    return said


def test_a_model_is_fetched_once(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    text = fetch(capsys, T2I)
    assert "11.4 GB" in text and "Apache-2.0" in text and "MIT" in text
    assert Located(entries()[T2I]).missing() == []
    assert str(Located(entries()[T2I])["target"]) in text
    hub.asked.clear()
    assert "here already" in fetch(capsys, T2I)
    assert hub.asked == []


def test_only_some_parts(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it still lacks: target" in fetch(capsys, ANOLE, "--only", "vq")
    assert set(Located(entries()[ANOLE]).absent) == {"target", "drafter"}
    assert fetch(capsys, ANOLE, "--without-drafter").strip().endswith("--method ar")
    assert set(Located(entries()[ANOLE]).absent) == {"drafter"}
    assert "contradict" in refused(capsys, T2I, "--only", "drafter", "--without-drafter")
    assert "has no part drafter" in refused(capsys, C2I, "--only", "drafter")


def test_a_folder_gets_a_subfolder_for_each_part(
    hub: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path, empty_cache: Path
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
    said = refused(capsys, ANOLE, "--to", str(folder))
    assert f"{folder} holds {T2I}" in said


@pytest.mark.parametrize("to", [False, True], ids=["cache", "folder"])
def test_a_damaged_file_is_deleted(
    hub: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path, empty_cache: Path, to: bool
) -> None:
    hub.damaged = True
    args = ["--to", str(tmp_path / "here")] if to else []
    said = refused(capsys, C2I, *args)
    assert "c2i_B_256.pt" in said and "came damaged" in said and "deleted" in said
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "main"]
    assert left == []
    hub.damaged = False
    fetch(capsys, C2I, *args)


def test_another_version_is_refused_before_it_is_fetched(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entries()["llamagen-c2i-l-256"]
    assert entry.parts["target"].sha256
    monkeypatch.setattr(registry, "entries", lambda: {entry.name: entry})
    assert "another c2i_L_256.pt than the known one" in refused(capsys, entry.name)
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


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("to", [False, True], ids=["cache", "folder"])
def test_failures_are_said_in_plain_words_and_leave_nothing(
    hub: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, to: bool
) -> None:
    make, words = FAILURES[kind]
    hub.fails = make()
    said = refused(capsys, C2I, *(["--to", str(tmp_path / "here")] if to else []))
    assert all(word in said for word in words), said
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not (tmp_path / "here").exists()


def test_a_file_that_is_gone_is_named(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    del hub.files["google/flan-t5-xl"]["spiece.model"]
    said = refused(capsys, T2I)
    assert "google/flan-t5-xl lacks files: spiece.model" in said
    assert hub.asked == []


ODD_NAMES = (
    *("vae/../../../../theirs", "vae/../x", "/theirs", "vae//x", "vae/", "vae/./x", ".."),
    *("vae/a\0b", "vae/a\nb", "vae/\ud800", "vae\\..\\x", "C:/x", "vae/" + 300 * "x", "", 3),
)


@pytest.mark.parametrize("to", [False, True], ids=["cache", "folder"])
@pytest.mark.parametrize("name", [n for n in ODD_NAMES if str(n).startswith("vae/")], ids=ascii)
def test_a_listed_name_that_leads_elsewhere_is_refused_before_anything_is_written(
    hub: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, to: bool
) -> None:
    """A mark under such a name would empty a file, and the file itself would replace it."""
    theirs = tmp_path / "theirs"
    theirs.write_text("secret")
    hub.files["zai-org/GLM-Image"][name] = b"hostile"
    said = refused(capsys, "glm-image", *(["--to", str(tmp_path / "here")] if to else []))
    assert "list of zai-org/GLM-Image is refused" in said
    assert theirs.read_text() == "secret" and hub.asked == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [theirs]


@pytest.mark.parametrize(
    "commit", ["../../../../x", "main", "c" * 39, "C" * 40, "c" * 41, "", None, 3]
)
def test_a_commit_that_is_none_is_refused_before_anything_is_written(
    hub: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path, commit: str
) -> None:
    hub.commit = commit
    assert "it names the commit" in refused(capsys, C2I)
    assert hub.asked == [] and not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("size", ["x", [], -1, 10**30])
def test_sizes_that_lie_are_not_counted(
    hub: Hub, capsys: pytest.CaptureFixture[str], size: object
) -> None:
    hub.size = size
    if size == 10**30:
        assert "not enough space" in refused(capsys, C2I)
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


def test_space_is_checked_first(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(free=20)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: full)
    said = refused(capsys, C2I)
    assert "not enough space" in said and "needed, 20 bytes free" in said
    assert hub.asked == []


def test_interrupted_nothing_is_taken_for_whole(
    hub: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "here"
    staged = folder / fetching.STAGING / "target"
    staged.mkdir(parents=True)
    (staged / "c2i_B_256.pt.1234.incomplete").write_text("half")
    hub.fails = KeyboardInterrupt()
    assert download.main([C2I, "--to", str(folder)]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not any(Located(entries()[C2I], folder).values())
    assert list(staged.iterdir())  # a version that resumes can go on
    hub.fails = None
    fetch(capsys, C2I, "--to", str(folder))
    assert not (folder / fetching.STAGING).exists()


def test_what_killed_runs_left_in_the_cache_goes_once_the_file_is_whole(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library writes each try to another name, so they would add up to many times the model."""
    repo, name = entries()[C2I].parts["target"].repo, "c2i_B_256.pt"
    blobs = located.store(repo) / "blobs"
    blobs.mkdir(parents=True)
    mine = blobs / f"{hashlib.sha256(name.encode()).hexdigest()}.173f1edc.incomplete"
    another = blobs / f"{'0' * 64}.173f1edc.incomplete"  # perhaps of a run that goes on
    for half in (mine, another):
        half.write_text("half")
    fetch(capsys, C2I, "--only", "target")
    assert not mine.exists() and another.exists()


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


def test_halves_go_by_their_name_and_not_by_a_pattern(tmp_path: Path) -> None:
    """Where the cache has no links a file has its own name there, which may have brackets."""
    whole = tmp_path / "part[1].bin"
    mine, another = (tmp_path / f"{name}.173f.incomplete" for name in (whole.name, "part1.bin"))
    for file in (whole, mine, another):
        file.write_text("half")
    fetching.drop_halves(whole)
    assert whole.exists() and not mine.exists() and another.exists()


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_a_file_in_the_cache_that_was_not_checked_is_checked_by_the_next_run(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    def killed(path: Path) -> str:
        raise KeyboardInterrupt

    entry = entries()[C2I]
    hub.damaged = damaged
    monkeypatch.setattr(fetching, "sha256", killed)
    assert download.main([C2I, "--only", "target"]) == 130
    part = entry.parts["target"]
    folder = located.cached_folder(part)
    assert folder is not None and part.absent(folder) == ()  # it has its final name
    assert Located(entry)["target"] is None
    assert Located(entry).absent["target"] == part.files
    monkeypatch.setattr(fetching, "sha256", sha256)
    capsys.readouterr()
    if damaged:
        assert "came damaged" in refused(capsys, C2I, "--only", "target")
        assert part.absent(located.cached_folder(part)) == part.files
    else:
        fetch(capsys, C2I, "--only", "target")
        assert Located(entry)["target"] is not None
    assert located.unchecked(part.repo) == set()
    assert not (located.store(part.repo) / located.UNCHECKED).exists()


def test_without_huggingface_hub(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = refused(capsys, C2I)
    assert "huggingface_hub is not installed" in said and "lantern-hpu[models]" in said
