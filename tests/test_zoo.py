"""Known models: the facts hold together, and what is here is found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lantern_hpu.cli import COMMANDS, OF_MODELS, module_of
from lantern_hpu.commands import generate, models
from lantern_hpu.core import Sampling
from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.files import ASSETS
from lantern_hpu.models.families import FAMILIES
from lantern_hpu.models.model import EmptyModel, count_numbers, parameters_of
from lantern_hpu.models.pictures import PARTS
from lantern_hpu.models.text.prefix import class_index
from lantern_hpu.zoo import find, registry
from lantern_hpu.zoo.find import Located, find_parts
from lantern_hpu.zoo.registry import KnownModel, Part, entries, find_model_by_name
from scripts.house import option_names
from tests.hub_cache import ANOLE, C2I, T2I, empty_cache, in_cache, whole

ROOT = Path(__file__).parent.parent
HOLDS_TOKENIZER = {"janus", "emu3"}  # families whose image tokenizer lies in the target's own file
__all__ = ["empty_cache"]


# The facts


def every_part() -> list[Any]:
    found = [
        (entry, source)
        for entry in entries().values()
        for part in entry.parts.values()
        for source in part.sources
    ]
    return [pytest.param(e, p, id=f"{e.name}-{p.role}-{p.repo}") for e, p in found]


@pytest.mark.parametrize(("entry", "part"), every_part())
def test_every_part_is_complete(entry: KnownModel, part: Part) -> None:
    assert part.role in registry.PARTS
    assert part.repo.count("/") == 1
    assert part.licence and part.files
    assert part.needed_for in registry.NEEDED_FOR
    assert part.bytes is None or part.bytes > 10**6
    names = {name for spec in part.files for name in spec.split("|")}
    folders = {f"{name}/*" for name in PARTS} if part.role == "pixels" else set()
    if entry.family in ("emu3.5", "u0") and part.role == "target":
        folders = {"model*.safetensors*"}
    plain = {name.split("/")[-1] for name in names - folders}
    assert not [name for name in plain if "*" in name] and folders <= names
    assert set(part.sha256) <= names
    assert all(len(d) == 64 and int(d, 16) >= 0 for d in part.sha256.values())


@pytest.mark.parametrize("entry", entries().values(), ids=lambda e: e.name)
def test_every_model_is_complete(entry: KnownModel) -> None:
    assert entry.title and entry.licence
    (usual,) = {family.sampling for family in FAMILIES if family.name == entry.family}
    if entry.family in ("glm-image", "mammothmoda2"):  # their pictures are a diffusion model's
        beside = "pixels" if entry.family == "glm-image" else "text"
        assert set(entry.parts) == {"target", beside} and entry.config.vq is None
        assert Sampling(**entry.sampling) == usual  # type: ignore[arg-type]
        return
    inside = entry.family in HOLDS_TOKENIZER
    assert ({"target"} | (set() if inside else {"vq"})) <= set(entry.parts) <= set(registry.PARTS)
    assert (
        entry.config.vq is not None and entry.config.vq.codebook_size == entry.config.target.codes
    )
    assert ("drafter" in entry.parts) == (entry.config.drafter is not None)
    lacks_words = entry.family in ("emu3.5", "u0")  # they read Qwen2.5's tokenizer
    assert ("text" in entry.parts) == (entry.config.text is not None or lacks_words)
    side = entry.image_size // entry.config.vq.downsample
    assert entry.config.target.grid == (side, side)
    prefixes = {"llamagen-t2i": 120, "llamagen-c2i": 1}
    assert entry.config.target.prefix == prefixes.get(entry.family, 256)
    published = {
        "llamagen-t2i": (7.5, 1000),
        "llamagen-c2i": (4.0, 2000),
        "chameleon": (3.0, 2000),
        "janus": (5.0, 0),
        "lumina": (3.0, 2000),
        "lumina2": (4.0, 4096),
        "emu3": (3.0, 2048),
        "emu3.5": (5.0, 5120),
        "u0": (5.0, 5120),
        "simplear": (6.0, 0),
    }
    scale, top_k = published[entry.family]
    assert Sampling(**entry.sampling) == Sampling(scale, 1.0, top_k, 1.0)  # type: ignore[arg-type]
    assert usual == Sampling(scale, 1.0, top_k, 1.0)


def test_parameters_are_the_published_ones() -> None:
    published = {
        "llamagen-c2i-b-256": 110.9,
        "llamagen-c2i-l-384": 342.9,
        "llamagen-c2i-xl-384": 774.7,
        "llamagen-c2i-xxl-384": 1411.0,
        "llamagen-c2i-3b-384": 3096.7,
    }
    counted = {name: parameters_of(entries()[name].config) for name in (*published, T2I, ANOLE)}
    assert {n: round(counted[n]["target"] / 1e6, 1) for n in published} == published
    parts = {"target": 777_923_840, "drafter": 44_567_040, "text": 1_223_527_424}
    assert {part: counted[T2I][part] for part in parts} == parts
    assert counted[ANOLE]["drafter"] == 504_393_728


@pytest.mark.parametrize("entry", entries().values(), ids=lambda e: e.name)
def test_files_are_as_large_as_their_parameters(entry: KnownModel) -> None:
    """LlamaGen's files hold float32; Anole's hold bfloat16, the unused rows of the head, and its tokenizer."""
    held, sizes = parameters_of(entry.config), entry.config.target
    target = entry.parts["target"].bytes
    assert target is not None
    counted = held["target"] * 4
    empty = EmptyModel.of(entry.config)
    unused = count_numbers(empty.target.embed) - empty.head
    if entry.family == "glm-image":  # and what reads pictures beside it
        matrices = sum(matrix.numel() for matrix in empty.matrices[0]) - empty.head
        assert round(matrices / sizes.layers / 1e6, 2) == 203.95 and sizes.preview_grid == (16, 16)
        assert 0.85 * target < held["target"] * 2 < target
        return
    if (
        entry.family == "mammothmoda2"
    ):  # and the head of words, what reads pictures, what makes them
        assert round(held["target"] / 1e9, 1) == 10.1 and 0.65 * target < held["target"] * 2
        assert 2 * sizes.layers * sizes.kv_width * 2 == 57344  # bytes of keys and values a token
        return
    if entry.family == "janus":  # and what reads pictures beside it
        assert counted / 2 < target < 0.8 * counted
        return
    if entry.family == "simplear":  # one table, in bfloat16
        counted = (held["target"] - empty.head) * 2
    if entry.family in ("chameleon", "lumina", "lumina2", "emu3", "emu3.5", "u0"):
        inside = entry.family in ("chameleon", "emu3")
        counted = (held["target"] + unused) * 2 + held["vq"] * 4 * inside
    assert abs(target - counted) < 0.001 * counted + 2**20


def test_found_by_name_and_by_hub_id() -> None:
    assert find_model_by_name(T2I) is entries()[T2I]
    found = find_model_by_name("jadohu/LlamaGen-T2I")
    assert found is not None and found.name == T2I
    assert found.parts["target"].repo == "jadohu/LlamaGen-T2I"
    assert found.parts["target"].instead[0].repo == "peizesun/llamagen_t2i"
    found = find_model_by_name("FoundationVision/LlamaGen/c2i_B_256.pt")
    assert found is not None and found.name == C2I
    assert find_model_by_name("leloy/Anole-7b-v0.1-hf") == entries()[ANOLE]
    assert find_model_by_name("nobody/nothing") is None
    with pytest.raises(OptionError, match="several models") as caught:
        registry.get("FoundationVision/LlamaGen")
    assert "name the one you mean" in str(caught.value)
    assert caught.value.hint.count("llamagen-c2i") == 7


# What is here


def test_a_cache_is_recognised(empty_cache: Path) -> None:
    entry = entries()[T2I]
    whole(empty_cache, entry)
    found = Located(entry)
    assert found.missing() == []
    assert found["target"] is not None and found["target"].name == "t2i_XL_stage1_256.pt"
    assert found["vq"] is not None and found["vq"].name == "vq_ds16_t2i.pt"
    assert found["text"] is not None and (found["text"] / "config.json").is_file()
    assert find.require_parts(entry)["drafter"] == found["drafter"]


def test_without_huggingface_hub_only_folders_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    whole(empty_cache, entries()[C2I])
    assert Located(entries()[C2I]).missing() == []
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert Located(entries()[C2I])["target"] is None


def test_either_of_two_files_and_of_two_repositories(empty_cache: Path) -> None:
    entry = entries()[T2I]
    in_cache(empty_cache, entry.parts["drafter"].repo, "config.json", "pytorch_model.bin")
    in_cache(empty_cache, "jadohu/LlamaGen-T2I", "config.json", "model.safetensors")
    found = Located(entry)
    assert found["drafter"] is not None and found["drafter"].is_dir()
    assert found["target"] is not None and (found["target"] / "model.safetensors").is_file()


def test_a_part_with_a_missing_or_broken_file_is_not_here(empty_cache: Path) -> None:
    entry = entries()[ANOLE]
    part = entry.parts["target"]
    folder = in_cache(empty_cache, part.repo, *part.files)
    assert Located(entry)["target"] == folder
    shard = folder / "model-00002-of-00003.safetensors"
    shard.resolve().rename(
        shard.resolve().with_suffix(".incomplete")
    )  # as an interrupted run leaves it
    found = Located(entry)
    assert found["target"] is None
    assert found.absent["target"] == (shard.name,)


def test_shards_of_an_unknown_number_are_here_when_all_of_them_are(empty_cache: Path) -> None:
    part = entries()["emu3.5-image"].parts["target"]
    assert Located(entries()["emu3.5-image"])["target"] is None
    shards = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    folder = in_cache(empty_cache, part.repo, "config.json", *shards[:2])
    assert part.absent(folder) == ("model*.safetensors*",)  # as an interrupted run leaves it
    in_cache(empty_cache, part.repo, shards[2])
    assert part.absent(folder) == ()
    assert part.absent(folder, without={shards[1]}) == ("model*.safetensors*",)
    assert Located(entries()["emu3.5-image"])["target"] == folder


def test_what_is_missing_and_the_command_name_the_same_repository(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "jadohu/LlamaGen-T2I"
    with pytest.raises(WeightsError) as caught:
        find_parts(name)
    assert f"(config.json, model.safetensors of {name})" in caught.value.why
    assert f"download {name};" in caught.value.hint
    entry = registry.get(name)
    assert entry.needed()[0].repo == name
    text = listed(capsys, name)
    assert f"download {name}" in text and f"--model {name} " in text
    assert find_model_by_name("leloy/Anole-7b-v0.1-hf") == entries()[ANOLE]


# The list


WITHOUT_TORCH = """
import sys
from importlib import import_module
code = import_module("lantern_hpu.cli").main(sys.argv[1:])
sys.exit("torch was loaded" if "torch" in sys.modules else code)
"""


@pytest.mark.parametrize("args", [["models"], ["models", "builtin"]], ids=" ".join)
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
    described = json.loads(listed(capsys, "--json"))
    assert [model["name"] for model in described] == ["builtin", *entries()]
    lines = listed(capsys).splitlines()
    assert lines[1].startswith("builtin ") and lines[1].endswith("yes")
    (c2i,) = [line for line in lines if line.startswith(C2I)]
    (t2i,) = [line for line in lines if line.startswith(T2I)]
    (anole,) = [line for line in lines if line.startswith(ANOLE)]
    assert c2i.endswith("yes") and t2i.endswith("yes, but no drafter")
    assert anole.endswith("missing: target, drafter, vq")
    assert any("lantern-hpu models download NAME" in line for line in lines)


@pytest.mark.parametrize("name", [None, "builtin", *entries()])
def test_it_reads_well_in_100_columns(capsys: pytest.CaptureFixture[str], name: str | None) -> None:
    for line in listed(capsys, *([name] if name else [])).splitlines():
        assert str(ROOT) in line or len(line) <= 100
        assert not line.endswith(" ")


def test_classes_are_asked_for_by_label(capsys: pytest.CaptureFixture[str]) -> None:
    name = "llamagen-c2i-xxl-384"  # the longest; the command stays on one line
    said = re.search(rf"generate (--model {name} --prompt (\S+))$", listed(capsys, name), re.M)
    assert said is not None
    args = generate.make_parser().parse_args(said[1].split())
    assert args.prompt == [said[2]] and class_index(said[2]) == 1


def test_options_that_the_registry_names_exist() -> None:
    named = set(re.findall(r"--[a-z][a-z-]+", (ASSETS / "registry.json").read_text()))
    parsers = [import_module(module_of(name)).make_parser() for name in (*COMMANDS, *OF_MODELS)]
    assert named <= set[str]().union(*map(option_names, parsers))
