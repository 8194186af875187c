"""Known models: the facts hold together, what is here is found, downloads fail in plain words and leave nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lantern_hpu import download, generate, memory, plan, registry
from lantern_hpu.config import Sampling
from lantern_hpu.errors import DeviceError, OptionError, WeightsError
from lantern_hpu.hub import sha256
from lantern_hpu.models import __main__ as models
from lantern_hpu.models.classes import class_index
from lantern_hpu.parts import Given, resolve
from lantern_hpu.registry import Entry, Part, entries, find, locate, missing
from lantern_hpu.tree import DraftTree, load_tree

ROOT = Path(__file__).parent.parent
T2I, C2I, ANOLE = "llamagen-t2i-256", "llamagen-c2i-b-256", "anole-7b"


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Hugging Face cache of our own."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "hub"


def in_cache(hub: Path, repo: str, *files: str, revision: str = "a" * 40) -> Path:
    """Files of a repository as huggingface_hub lays them out."""
    store = hub / ("models--" + repo.replace("/", "--"))
    folder = store / "snapshots" / revision
    for name in files:
        blob = store / "blobs" / hashlib.sha256(name.encode()).hexdigest()
        for place in (blob.parent, folder, store / "refs"):
            place.mkdir(parents=True, exist_ok=True)
        blob.write_text(name)
        (folder / name).symlink_to(blob)
    (store / "refs" / "main").write_text(revision)
    return folder


def whole(hub: Path, entry: Entry, *roles: str) -> None:
    for role in roles or entry.parts:
        part = entry.parts[role]
        in_cache(hub, part.repo, *(spec.split("|")[0] for spec in part.files))


# ------------------------------------------------------------------------------------ the facts


def every_part() -> list[Any]:
    found = [
        (entry, source)
        for entry in entries().values()
        for part in entry.parts.values()
        for source in part.sources
    ]
    return [pytest.param(e, p, id=f"{e.name}-{p.role}-{p.repo}") for e, p in found]


def test_the_known_models_are_all_there() -> None:
    assert list(entries()) == [
        *("llamagen-t2i-256", "llamagen-t2i-512"),
        *("llamagen-c2i-b-256", "llamagen-c2i-l-256", "llamagen-c2i-b-384", "llamagen-c2i-l-384"),
        *("llamagen-c2i-xl-384", "llamagen-c2i-xxl-384", "llamagen-c2i-3b-384", "anole-7b"),
    ]


@pytest.mark.parametrize(("entry", "part"), every_part())
def test_every_part_is_complete(entry: Entry, part: Part) -> None:
    assert part.role in registry.PARTS
    assert part.repo.count("/") == 1
    assert part.licence and part.files
    assert part.needed_for in registry.NEEDED_FOR
    assert part.bytes is None or part.bytes > 10**6
    names = {name for spec in part.files for name in spec.split("|")}
    assert not [name for name in names if "/" in name or "*" in name]
    assert set(part.sha256) <= names
    assert all(len(d) == 64 and int(d, 16) >= 0 for d in part.sha256.values())


@pytest.mark.parametrize("entry", entries().values(), ids=lambda e: e.name)
def test_every_model_is_complete(entry: Entry) -> None:
    assert entry.title and entry.licence
    assert entry.family in registry.FAMILIES
    assert {"target", "vq"} <= set(entry.parts) <= set(registry.PARTS)
    assert ("drafter" in entry.parts) == (entry.geometry.drafter is not None)
    assert ("text" in entry.parts) == (entry.geometry.text_parameters > 0)
    assert entry.grid == (entry.image_size // 16, entry.image_size // 16)
    assert entry.prefix == {"llamagen-t2i": 120, "llamagen-c2i": 1, "chameleon": 256}[entry.family]
    published = {"llamagen-t2i": (7.5, 1000), "llamagen-c2i": (4.0, 0), "chameleon": (3.0, 2000)}
    scale, top_k = published[entry.family]
    assert Sampling(**entry.sampling) == Sampling(scale, 1.0, top_k, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("llamagen-c2i-b-256", 110.9),
        ("llamagen-c2i-l-384", 342.9),
        ("llamagen-c2i-xl-384", 774.7),
        ("llamagen-c2i-xxl-384", 1411.0),
        ("llamagen-c2i-3b-384", 3096.7),
    ],
)
def test_parameters_are_the_published_ones(name: str, millions: float) -> None:
    assert round(entries()[name].geometry.target_parameters / 1e6, 1) == millions


def test_parameters_of_text_to_image_models() -> None:
    sizes = entries()[T2I].geometry
    assert sizes.target_parameters == 777_923_840
    without_uncond = sizes.target_parameters - sizes.prefix * sizes.caption_dim
    assert round(without_uncond / 1e6, 1) == 777.7
    assert sizes.drafter_parameters == 44_567_040
    assert entries()[ANOLE].geometry.drafter_parameters == 504_393_728


@pytest.mark.parametrize("entry", entries().values(), ids=lambda e: e.name)
def test_files_are_as_large_as_their_parameters(entry: Entry) -> None:
    """LlamaGen's files hold float32; Anole's hold bfloat16, the unused rows of the head, and its tokenizer."""
    sizes = entry.geometry
    target = entry.parts["target"].bytes
    assert target is not None
    counted = sizes.target_parameters * 4
    if entry.family == "chameleon":
        unused = (sizes.embed_rows - sizes.vocab) * sizes.dim
        counted = (sizes.target_parameters + unused) * 2 + sizes.vq_parameters * 4
    assert abs(target - counted) < 0.001 * counted + 2**20


def test_found_by_name_and_by_hub_id() -> None:
    assert find(T2I) is entries()[T2I]
    found = find("jadohu/LlamaGen-T2I")
    assert found is not None and found.name == T2I
    assert found.parts["target"].repo == "jadohu/LlamaGen-T2I"
    assert found.parts["target"].instead[0].repo == "peizesun/llamagen_t2i"
    found = find("FoundationVision/LlamaGen/c2i_B_256.pt")
    assert found is not None and found.name == C2I
    assert find("leloy/Anole-7b-v0.1-hf") == entries()[ANOLE]
    assert find("FoundationVision/LlamaGen") is None  # seven models
    assert find("nobody/nothing") is None


def test_an_id_of_several_models_names_them() -> None:
    with pytest.raises(OptionError, match="several models") as caught:
        registry.get("FoundationVision/LlamaGen")
    assert "name the one you mean" in str(caught.value)
    assert caught.value.hint.count("llamagen-c2i") == 7


# ------------------------------------------------------------------------------------ what is here


def test_nothing_is_here_without_a_cache() -> None:
    located = locate(entries()[T2I])
    assert set(located) == {"target", "drafter", "vq", "text"}
    assert not any(located.values())
    assert [part.role for part in missing(entries()[T2I])] == ["target", "drafter", "vq", "text"]
    assert "drafter" not in [part.role for part in missing(entries()[T2I], drafting=False)]


def test_a_cache_is_recognised(empty_cache: Path) -> None:
    entry = entries()[T2I]
    whole(empty_cache, entry)
    located = locate(entry)
    assert missing(entry) == []
    assert located["target"] is not None and located["target"].name == "t2i_XL_stage1_256.pt"
    assert located["vq"] is not None and located["vq"].name == "vq_ds16_t2i.pt"
    assert located["text"] is not None and (located["text"] / "config.json").is_file()
    assert registry.require(entry)["drafter"] == located["drafter"]


def test_the_cache_is_where_huggingface_hub_has_it(
    monkeypatch: pytest.MonkeyPatch, empty_cache: Path, tmp_path: Path
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    part = entries()[C2I].parts["target"]
    in_cache(tmp_path / "elsewhere", part.repo, *part.files)
    assert locate(entries()[C2I])["target"] is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    theirs = hub.try_to_load_from_cache(part.repo, part.files[0], tmp_path / "elsewhere")
    assert str(locate(entries()[C2I])["target"]) == theirs


def test_either_of_two_files_and_of_two_repositories(empty_cache: Path) -> None:
    entry = entries()[T2I]
    in_cache(empty_cache, entry.parts["drafter"].repo, "config.json", "pytorch_model.bin")
    in_cache(empty_cache, "jadohu/LlamaGen-T2I", "config.json", "model.safetensors")
    located = locate(entry)
    assert located["drafter"] is not None and located["drafter"].is_dir()
    assert located["target"] is not None and (located["target"] / "model.safetensors").is_file()


def test_a_part_with_a_missing_or_broken_file_is_not_here(empty_cache: Path) -> None:
    entry = entries()[ANOLE]
    part = entry.parts["target"]
    folder = in_cache(empty_cache, part.repo, *part.files)
    assert locate(entry)["target"] == folder
    shard = folder / "model-00002-of-00003.safetensors"
    shard.resolve().rename(
        shard.resolve().with_suffix(".incomplete")
    )  # as an interrupted run leaves it
    located = locate(entry)
    assert located["target"] is None
    assert located.absent["target"] == (shard.name,)


def test_what_is_missing_is_listed_at_once_with_sizes(empty_cache: Path) -> None:
    whole(empty_cache, entries()[T2I], "vq")
    with pytest.raises(WeightsError) as caught:
        registry.require(entries()[T2I])
    said = str(caught.value)
    for words in (
        "target 3.11 GB (t2i_XL_stage1_256.pt of peizesun/llamagen_t2i)",
        "drafter 178 MB",
        "text 11.4 GB (8 files of google/flan-t5-xl)",
        "python -m lantern_hpu.download llamagen-t2i-256",
    ):
        assert words in said
    assert "vq_ds16" not in said
    with pytest.raises(WeightsError) as caught:
        registry.require(entries()[T2I], drafting=False)
    assert "drafter 178 MB" not in caught.value.why


def test_the_whole_model_is_suggested_first(empty_cache: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        resolve(ANOLE)
    first, second = caught.value.hint.split("; ")
    assert first == "python -m lantern_hpu.download anole-7b"
    assert second == "--without-drafter is 2.02 GB less and enough for --method ar"
    whole(empty_cache, entries()[ANOLE], "drafter")
    with pytest.raises(WeightsError) as caught:
        resolve(ANOLE)
    assert caught.value.hint == first


def test_what_is_missing_and_the_command_name_the_same_repository(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "jadohu/LlamaGen-T2I"
    with pytest.raises(WeightsError) as caught:
        resolve(name)
    assert f"(config.json, model.safetensors of {name})" in caught.value.why
    assert f"download {name};" in caught.value.hint
    entry = registry.get(name)
    assert download.choose(entry, "target", True)[0].repo == name
    text = listed(capsys, name)
    assert f"download {name}" in text and f"--model {name} " in text
    assert find("leloy/Anole-7b-v0.1-hf") == entries()[ANOLE]


# ------------------------------------------------------------------------------------ the list


WITHOUT_TORCH = """
import sys
from importlib import import_module
code = import_module(sys.argv[1]).main(sys.argv[2:])
sys.exit("torch was loaded" if "torch" in sys.modules else code)
"""


@pytest.mark.parametrize(
    "args",
    [
        ["lantern_hpu.models.__main__"],
        ["lantern_hpu.models.__main__", T2I],
        ["lantern_hpu.plan", ANOLE, "--memory", "24GB"],
        ["lantern_hpu.plan", "builtin", "--memory", "24GB"],
    ],
    ids=" ".join,
)
def test_no_torch_is_needed(args: list[str]) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def listed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert models.main(args) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_the_list_says_what_is_here(capsys: pytest.CaptureFixture[str], empty_cache: Path) -> None:
    whole(empty_cache, entries()[C2I])
    whole(empty_cache, entries()[T2I], "target", "vq", "text")
    lines = listed(capsys).splitlines()
    assert lines[1].startswith("builtin ") and lines[1].endswith("yes")
    (c2i,) = [line for line in lines if line.startswith(C2I)]
    (t2i,) = [line for line in lines if line.startswith(T2I)]
    (anole,) = [line for line in lines if line.startswith(ANOLE)]
    assert c2i.endswith("yes") and t2i.endswith("yes, but no drafter")
    assert anole.endswith("missing: target, drafter, vq")
    assert any("python -m lantern_hpu.download NAME" in line for line in lines)


@pytest.mark.parametrize("name", [None, "builtin", *entries()])
def test_it_reads_well_in_100_columns(capsys: pytest.CaptureFixture[str], name: str | None) -> None:
    for line in listed(capsys, *([name] if name else [])).splitlines():
        assert str(ROOT) in line or len(line) <= 100
        assert not line.endswith(" ")


def test_one_model_is_shown_with_files_settings_and_commands(
    capsys: pytest.CaptureFixture[str], empty_cache: Path
) -> None:
    whole(empty_cache, entries()[T2I], "vq")
    text = listed(capsys, T2I)
    for words in (
        "t2i_XL_stage1_256.pt",
        "google/flan-t5-xl",
        "--cfg-scale 7.5 --temperature 1 --top-k 1000 --top-p 1",
        "python -m lantern_hpu.download llamagen-t2i-256",
        'python -m lantern_hpu.generate --model llamagen-t2i-256 --prompt "a red apple"',
        str(locate(entries()[T2I])["vq"]),
        "licence not stated",
    ):
        assert words in text


def test_classes_are_asked_for_by_label(capsys: pytest.CaptureFixture[str]) -> None:
    name = "llamagen-c2i-xxl-384"  # the longest; the command stays on one line
    said = re.search(rf"generate (--model {name} --class-label (\S+))$", listed(capsys, name), re.M)
    assert said is not None
    args = generate.make_parser().parse_args(said[1].split())
    assert args.class_label == [said[2]] and class_index(said[2]) == 1


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(listed(capsys, "--json"))
    assert [model["name"] for model in said] == ["builtin", *entries()]
    assert said[0]["here"] and not said[1]["here"]
    assert json.loads(listed(capsys, ANOLE, "--json"))["parts"][0]["files"]


def test_an_unknown_model_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["nothing"]) == 2
    said = capsys.readouterr().err
    assert "unknown model 'nothing'" in said and all(name in said for name in entries())


# ------------------------------------------------------------------------------------ downloads


class Hub:
    """A Hub with some files; what a test wants to go wrong is put into `fails`."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.files: dict[str, dict[str, bytes]] = {}
        self.fails: BaseException | None = None
        self.damaged = False
        self.asked: list[str] = []

    def add(self, entry: Entry) -> None:
        for part in entry.parts.values():
            for spec in part.files:
                name = spec.split("|")[0]
                self.files.setdefault(part.repo, {})[name] = f"{part.repo}/{name}".encode()

    def model_info(self, repo: str, files_metadata: bool = False) -> SimpleNamespace:
        siblings = []
        for name, data in self.files[repo].items():
            lfs = SimpleNamespace(sha256=hashlib.sha256(data).hexdigest())
            siblings.append(SimpleNamespace(rfilename=name, size=len(data), lfs=lfs))
        return SimpleNamespace(siblings=siblings)

    def hf_hub_download(self, repo: str, name: str, local_dir: Path | None = None) -> str:
        self.asked.append(name)
        if self.fails is not None:
            raise self.fails
        data = b"cut off" if self.damaged else self.files[repo][name]
        if local_dir is None:
            there = registry.snapshot(repo)
            if there is not None and (there / name).exists():
                return str(there / name)
            in_cache(self.cache, repo, name)
            file = registry.snapshot(repo)
            assert file is not None
            (file / name).resolve().write_bytes(data)
            return str(file / name)
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


def without_digests(entry: Entry) -> Entry:
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
    assert missing(entries()[T2I]) == []
    assert str(locate(entries()[T2I])["target"]) in text
    hub.asked.clear()
    assert "here already" in fetch(capsys, T2I)
    assert hub.asked == []


def test_only_some_parts(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it still lacks: target" in fetch(capsys, ANOLE, "--only", "vq,neighbours")
    assert set(locate(entries()[ANOLE]).absent) == {"target", "drafter"}
    assert fetch(capsys, ANOLE, "--without-drafter").strip().endswith("--method ar")
    assert set(locate(entries()[ANOLE]).absent) == {"drafter"}


def test_a_folder_gets_a_subfolder_for_each_part(
    hub: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path, empty_cache: Path
) -> None:
    folder = tmp_path / "models" / "t2i"
    text = fetch(capsys, T2I, "--to", str(folder))
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["drafter", registry.LABEL, "target", "text", "vq"]
    assert not list(folder.rglob(".*"))
    entry = registry.of_folder(folder)
    assert entry is not None and entry.name == T2I
    assert missing(entry, folder=folder) == []
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
    staged = folder / download.STAGING / "target"
    staged.mkdir(parents=True)
    (staged / "c2i_B_256.pt.1234.incomplete").write_text("half")
    hub.fails = KeyboardInterrupt()
    assert download.main([C2I, "--to", str(folder)]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not any(locate(entries()[C2I], folder).values())
    assert list(staged.iterdir())  # a version that resumes can go on
    hub.fails = None
    fetch(capsys, C2I, "--to", str(folder))
    assert not (folder / download.STAGING).exists()


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_a_file_in_the_cache_that_was_not_checked_is_checked_by_the_next_run(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    def killed(path: Path) -> str:
        raise KeyboardInterrupt

    entry = entries()[C2I]
    hub.damaged = damaged
    monkeypatch.setattr(download, "sha256", killed)
    assert download.main([C2I, "--only", "target"]) == 130
    part = entry.parts["target"]
    folder = registry.snapshot(part.repo)
    assert folder is not None and part.absent(folder) == ()  # it has its final name
    assert locate(entry)["target"] is None
    assert locate(entry).absent["target"] == part.files
    monkeypatch.setattr(download, "sha256", sha256)
    capsys.readouterr()
    if damaged:
        assert "came damaged" in refused(capsys, C2I, "--only", "target")
        assert part.absent(registry.snapshot(part.repo)) == part.files
    else:
        fetch(capsys, C2I, "--only", "target")
        assert locate(entry)["target"] is not None
    assert registry.unchecked(part.repo) == set()
    assert not (registry.store(part.repo) / registry.UNCHECKED).exists()


def test_options_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "nothing")
    assert "unknown model 'nothing'" in said and all(name in said for name in entries())
    assert "comes with the package" in refused(capsys, "builtin")
    assert "has no part drafter" in refused(capsys, C2I, "--only", "drafter")
    assert "contradict" in refused(capsys, T2I, "--only", "drafter", "--without-drafter")


def test_without_huggingface_hub(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = refused(capsys, C2I)
    assert "huggingface_hub is not installed" in said and "lantern-hpu[models]" in said


def test_offline_by_environment(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    environ = {"PATH": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "lantern_hpu.download", C2I, "--to", str(tmp_path / "here")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    assert done.returncode == 2
    assert "the Hugging Face Hub cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "here").exists()


# ------------------------------------------------------------------------------------ memory


def test_caches_are_as_large_as_told() -> None:
    xl, anole = entries()["llamagen-t2i-512"].geometry, entries()[ANOLE].geometry
    assert memory.cache_bytes(xl, xl.layers, 2, 1280, 2) == 471_859_200  # 0.47 GB
    assert memory.cache_bytes(anole, anole.layers, 2, 1280, 2) == 1_342_177_280  # 1.3 GB


@pytest.mark.parametrize("tree", ["naive_extend_57", "chain", "dynamic"])
def test_capacity_is_the_decoder_s(tree: str) -> None:
    from lantern_hpu.state import capacity
    from tests.tiny import tiny_config

    config = tiny_config()
    sizes = replace(entries()[T2I].geometry, prefix=config.prefix, grid=config.grid)
    assert memory.capacity(sizes, load_tree(tree)) == capacity(config, load_tree(tree))


def counted(name: str | Path, **given: str) -> memory.Model:
    return plan.find_model(str(name), Given(**given))  # type: ignore[arg-type]


def setup(dtype: str = "bfloat16", tree: str | None = "chain", **options: Any) -> memory.Setup:
    """Of two images with guidance."""
    chosen = load_tree(tree) if tree else DraftTree.root_only()
    given = {"batch_size": 2, "guidance": True, **options}
    return memory.Setup(dtype, tree=chosen, **given)


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Published formats, small, and each converted, in `ours`."""
    from lantern_hpu import convert
    from scripts import make_synthetic_checkpoints as synthetic

    root = tmp_path_factory.mktemp("public")
    synthetic.write_all(root, only={"anole", "llamagen-t2i-256", "llamagen-c2i"})
    for name in ("anole", "llamagen-t2i-256", "llamagen-c2i"):
        assert convert.main([str(root / name), str(root / "ours" / name)]) == 0
    return root


FOLDERS = ("anole", "llamagen-t2i-256", "llamagen-c2i")


@pytest.mark.parametrize("name", [*FOLDERS, *(f"ours/{name}" for name in FOLDERS)])
def test_files_are_counted_as_they_are_loaded(public: Path, name: str) -> None:
    import torch
    from torch import nn

    from lantern_hpu.models.folder import Placement
    from lantern_hpu.models.load import load
    from lantern_hpu.state import DecodeState, Shapes

    def held(module: nn.Module | None) -> int:
        return sum(p.nbytes for p in module.parameters()) if module else 0

    model, loaded = counted(public / name), load(resolve(str(public / name)), Placement())
    main = nn.ModuleDict({**loaded.condition.parts(), "target": loaded.target})
    wanted = setup("float32", "chain" if loaded.drafter else None)
    rows = dict(memory.weights(model, wanted) + memory.state(model, wanted))
    assert rows["target weights"] == held(main)
    assert rows["drafter weights"] == held(loaded.drafter)
    assert rows["VQ weights (float32)"] == held(loaded.vq)
    config, shapes = loaded.target.config, Shapes(2, True, wanted.tree, 4)
    state = DecodeState.allocate(config, shapes, torch.float32, torch.device("cpu"))
    assert rows["target KV cache"] == 2 * state.target_cache.k.nbytes
    cache = state.drafter_cache
    assert rows["drafter KV cache"] == (2 * cache.k.nbytes if cache else 0)
    assert rows["prefix"] == state.prefix.nbytes
    assert model.sizes.image_size == loaded.image_size[0]
    assert model.sizes.vq_channels == loaded.vq.config.channels


def test_a_published_model_and_its_converted_copy_count_the_same(public: Path) -> None:
    for name in FOLDERS:
        assert memory.phases(counted(public / name), setup(tree=None)) == memory.phases(
            counted(public / "ours" / name), setup(tree=None)
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_text_encoder_is_counted_as_it_is_loaded(public: Path, dtype: str) -> None:
    import torch

    transformers = pytest.importorskip("transformers")
    folder = public / "llamagen-t2i-256" / "text"
    option = {"torch_dtype": getattr(torch, dtype)}
    encoder = transformers.T5EncoderModel.from_pretrained(folder, **option)
    rows = memory.text_weights(counted(folder.parent), setup(dtype))
    assert memory.total(rows) == sum(p.nbytes for p in encoder.parameters())


def test_the_known_text_encoder_has_the_known_size(tmp_path: Path) -> None:
    about = {"d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(about | {"feed_forward_proj": "gated-gelu"}))
    known = memory.of_known(entries()[T2I])
    found = memory.with_text(known, tmp_path)
    assert (found.text, found.text_float32) == (known.text, known.text_float32)


def bytes_of(tensor: Any) -> int:
    """Of a tensor, or of those that a quantized one is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return int(tensor.nbytes)
    return sum(bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


@pytest.mark.parametrize("name", ["anole", "ours/anole", "ours/llamagen-c2i"])
def test_int8_blocks_are_as_small_as_they_become(public: Path, name: str) -> None:
    pytest.importorskip("torchao")
    import torch

    from lantern_hpu.models.folder import Placement
    from lantern_hpu.models.load import load
    from lantern_hpu.models.quantize import quantize

    loaded = load(resolve(str(public / name)), Placement(torch.bfloat16))
    quantize(loaded.target, "int8")
    parts = [loaded.target, *loaded.condition.parts().values()]
    held = sum(bytes_of(weight.data) for part in parts for weight in part.parameters())
    model = counted(public / name)
    assert dict(memory.weights(model, setup(quantize="int8", tree=None)))["target weights"] == held
    full = memory.weights(model, setup(tree=None))
    loading = memory.phases(model, setup(quantize="int8", tree=None))[memory.LOADING]
    assert memory.total(loading) > memory.total(full)  # it is loaded before it is made smaller


def test_prompts_are_encoded_when_all_else_is_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the phases of a plan rest on: caches are allocated, the drafter is there though nothing is drafted."""
    from lantern_hpu.pipeline import LanternPipeline
    from tests.folder import write_folder

    seen = []
    pipeline = LanternPipeline.from_pretrained(str(write_folder(tmp_path)))
    model = pipeline.model
    monkeypatch.setattr(
        model.condition,
        "prepare",
        lambda prompts: seen.append((len(pipeline.engines), model.drafter is not None)),
    )
    pipeline("a red apple", method="ar")
    assert seen == [(1, True)]


def test_the_text_encoder_leaves_before_images_are_drawn() -> None:
    model = memory.of_known(entries()["llamagen-t2i-512"])
    text = dict(memory.text_weights(model, setup()))["text encoder weights"]

    def needed(**options: Any) -> dict[str, int]:
        found = memory.phases(model, setup(**options))
        return {phase: memory.total(rows) for phase, rows in found.items()}

    host, free, device = (needed(keep_text=keep) for keep in ("host", "free", "device"))
    assert host == free
    assert device[memory.ENCODING] == host[memory.ENCODING]
    assert device[memory.DRAWING] == host[memory.DRAWING] + text
    # On the processor itself the host is the device.
    assert needed(is_host=True) == device
    assert needed(is_host=True, keep_text="free") == free
    rows = memory.phases(model, setup())[memory.ENCODING]
    assert {"text encoder weights", "target weights", "VQ weights (float32)"} < dict(rows).keys()
    assert {"drafter weights", "target KV cache", "drafter KV cache"} < dict(rows).keys()


def test_less_is_less() -> None:
    model = memory.of_known(entries()["llamagen-t2i-512"])
    usual = memory.peak(model, setup())
    assert memory.peak(model, setup("float32")) > usual
    assert memory.peak(model, setup(batch_size=4)) > usual
    assert memory.peak(model, setup(guidance=False)) < usual
    assert memory.peak(model, setup(keep_text="device")) > usual
    assert memory.peak(model, setup(tree=None)) < usual
    with pytest.raises(OptionError, match="needs a drafter"):
        memory.phases(memory.of_known(entries()[C2I]), setup())


def test_a_drafter_that_is_not_used_is_loaded_if_it_is_here(empty_cache: Path) -> None:
    entry = entries()[T2I]
    without = memory.peak(memory.of_known(entry), setup(tree=None))
    whole(empty_cache, entry, "drafter")
    drafter = entry.geometry.drafter_parameters * 2
    assert memory.peak(memory.of_known(entry), setup(tree=None)) == without + drafter


def planned(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    assert plan.main([str(arg) for arg in args]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def not_planned(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    assert plan.main([str(arg) for arg in args]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said
    return said


def test_the_plan_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, T2I, "--memory", "24GB")
    assert "total while encoding prompts" in text and "(while drawing" in text
    assert "fits in 24.0 GB (as given)" in text
    assert planned(capsys, T2I, "--device", "any:24GB") == text
    text = planned(capsys, T2I, "--memory", "24GB", "--keep-text", "device")
    assert "total while drawing" in text and "(while encoding prompts" in text
    said = json.loads(planned(capsys, T2I, "--memory", "24GB", "--json"))
    assert said["fits"] and said["total"] == sum(said["bytes"].values())
    assert said["total"] == said["phases"][said["phase"]] == max(said["phases"].values())
    assert said["phase"] == "encoding prompts" and said["not_counted"] == []


def test_the_plan_says_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, ANOLE, "--memory", "24GB", "--dtype", "float32", "--batch-size", "4")
    assert "does not fit in 24.0 GB" in text
    assert "--dtype bfloat16: 22.5 GB, fits" in text
    text = planned(capsys, T2I, "--memory", "4.6GB", "--batch-size", "2", "--keep-text", "device")
    assert "  --keep-text host: " in text and text.strip().endswith("fits")
    text = planned(capsys, T2I, "--memory", "4GB")
    assert "--quantize int8: 3.83 GB, fits" in text
    assert "--keep-text" not in text  # it would change nothing
    assert "nothing makes it fit" in planned(capsys, ANOLE, "--memory", "2GB")


def test_what_does_not_fit_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for a card: the processor with 60 MB of its own."""
    from lantern_hpu import pipeline, random_weights
    from lantern_hpu.backends.base import Memory
    from lantern_hpu.backends.cpu import CPUBackend

    class Card(CPUBackend):
        is_host = False

        def memory(self) -> Memory:
            return Memory(10**8, 6 * 10**7, None)

    loaded: list[Any] = []
    monkeypatch.setattr(pipeline, "get_backend", lambda *args: Card())
    monkeypatch.setattr(pipeline, "load", lambda *args: loaded.append(args))
    with pytest.raises(DeviceError, match=r"builtin needs 86\.2 MB") as refused:
        pipeline.LanternPipeline.from_pretrained("builtin")
    assert "does not fit in 60.0 MB (free on cpu): 26.2 MB too much" in refused.value.why
    assert "--dtype bfloat16: 50.6 MB, fits" in refused.value.hint
    assert not loaded
    with pytest.raises(DeviceError, match=f"{ANOLE} needs .* GB"):
        random_weights.random_pipeline(entries()[ANOLE], Card(), "auto", "eager")


def test_the_remedies_are_options_of_generate(capsys: pytest.CaptureFixture[str]) -> None:
    worst = ("--dtype", "float32", "--batch-size", "8", "--keep-text", "device")
    text = planned(capsys, T2I, "--memory", "1GB", *worst)
    known = {
        option
        for parser in (generate.make_parser(), download.make_parser())
        for action in parser._actions
        for option in action.option_strings
    }
    found = set(re.findall(r"--[a-z-]+", text))
    assert found <= known
    assert {"--keep-text", "--dtype", "--batch-size", "--quantize", "--method"} < found
    assert {"--cfg-scale", "--without-drafter"} < found


def test_int8_is_named_only_where_the_device_offers_it(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--memory", "12GB", "--json")
    small = json.loads(planned(capsys, ANOLE, *given, "--quantize", "int8"))
    usual = json.loads(planned(capsys, ANOLE, *given))
    assert small["phases"]["drawing"] < 0.7 * usual["phases"]["drawing"]
    assert small["phase"] == "loading"
    assert "--quantize" in planned(capsys, T2I, "--memory", "4GB")
    assert "--quantize" in planned(capsys, T2I, "--device", "cuda:4GB")
    assert "--quantize" not in planned(capsys, T2I, "--device", "hpu:4GB")
    said = not_planned(capsys, T2I, "--device", "hpu:96GB", "--quantize", "int8")
    assert "does not offer 'int8' weights" in said
    assert "one of int8" in not_planned(capsys, T2I, "--memory", "4GB", "--quantize", "int4")


def test_a_device_that_is_not_asked_still_has_its_own_format(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert f"{T2I}, float32," in planned(capsys, T2I, "--device", "cpu:64GB")
    assert f"{T2I}, bfloat16," in planned(capsys, T2I, "--device", "cuda:64GB")


def test_the_plan_of_the_embedded_model_on_this_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "fits in" in planned(capsys, "builtin", "--device", "cpu")


def test_the_plan_of_a_folder_without_a_drafter(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tests.folder import write_folder

    folder = write_folder(tmp_path)
    before = counted(folder)
    about = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(about | {"drafter": None}))
    (folder / "drafter.safetensors").unlink()
    model = counted(folder)
    assert model == replace(before, drafter=0) and before.drafter
    text = planned(capsys, folder, "--memory", "1GB")
    assert "tree root" in text and "drafter" not in text
    said = not_planned(capsys, folder, "--memory", "1GB", "--method", "eagle")
    assert "the model has none" in said and "--method ar" in said


def test_a_drafter_is_counted_with_sizes_of_its_own(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from lantern_hpu.models.drafter import Drafter
    from tests.folder import write_folder
    from tests.tiny import tiny_config

    folder = write_folder(tmp_path / "model")
    drafter = Drafter(tiny_config(ffn_dim=200, qk_norm=True), input_norm=True)
    own = {"input_norm": True, "sees_pads": False, "ffn_dim": 200, "qk_norm": True}
    about = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(about | {"drafter": own}))
    save_file(drafter.state_dict(), folder / "drafter.safetensors")
    model = counted(folder)
    assert model.drafter == sum(p.numel() for p in drafter.parameters())
    assert model.ffn_dim == 200


def test_parts_of_ones_own_are_counted(public: Path, tmp_path: Path) -> None:
    model = counted(public / "ours" / "anole")
    parts = public / "anole"
    assert counted(public / "ours" / "anole", drafter=str(parts / "drafter")) == model
    assert counted(public / "ours" / "anole", vq=str(parts / "vqgan.ckpt")) == model
    other = public / "llamagen-t2i-256" / "drafter"
    assert counted(public / "ours" / "anole", drafter=str(other)).drafter != model.drafter


def test_a_text_encoder_that_is_not_here_is_not_guessed(
    public: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = shutil.copytree(public / "ours" / "llamagen-t2i-256", tmp_path / "t2i")
    about = json.loads((folder / "model.json").read_text())
    about["condition"]["text"] = str(tmp_path / "gone")
    (folder / "model.json").write_text(json.dumps(about))
    text = planned(capsys, folder, "--memory", "1GB")
    assert "the text encoder is not here and not counted: --text-encoder FOLDER" in text
    assert "fits in 1.00 GB (as given), without the text encoder" in text
    said = json.loads(planned(capsys, folder, "--memory", "1GB", "--json"))
    assert said["fits"] is None and said["not_counted"] == ["text encoder weights"]
    own = public / "llamagen-t2i-256" / "text"
    text = planned(capsys, folder, "--memory", "1GB", "--text-encoder", own)
    assert "not counted" not in text and "without the text encoder" not in text


def test_what_cannot_be_planned_says_why(
    public: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    memory = ("--memory", "1GB")
    said = not_planned(capsys, "nothing", *memory)
    assert "unknown model 'nothing'" in said and "a folder or a weights file" in said
    assert "several models" in not_planned(capsys, "FoundationVision/LlamaGen", *memory)
    alone = Path(shutil.copy(public / "llamagen-c2i" / "c2i_B_256.pt", tmp_path))
    assert "--vq" in not_planned(capsys, alone, *memory)
    vq = public / "llamagen-c2i" / "vq_ds16_c2i.pt"
    assert "fits in" in planned(capsys, alone, *memory, "--vq", vq)
    folder = shutil.copytree(public / "ours" / "anole", tmp_path / "ours")
    (folder / "target.safetensors").write_bytes(b"\xff" * 100)
    said = not_planned(capsys, folder, *memory)
    assert "damaged or cut off" in said and "convert or copy it again" in said


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GB", 24 * 10**9), ("96 GiB", 96 * 2**30), ("500MB", 5 * 10**8), ("1.5g", 15 * 10**8)],
)
def test_amounts_of_memory(text: str, count: int) -> None:
    assert plan.parse_memory(text) == count


@pytest.mark.parametrize("text", ["", "much", "24 apples", "-1GB", "0GB", "1.2.3GB"])
def test_what_is_no_amount(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert plan.main([T2I, f"--memory={text} "]) == 2
    assert "not an amount" in capsys.readouterr().err
