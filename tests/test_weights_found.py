"""Weights as people have them: of compiled or divided models, in pieces, beside others, or no weights at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lantern_hpu.core import Request
from lantern_hpu.errors import WeightsError
from lantern_hpu.files import MOST_TEXT
from lantern_hpu.models.families.eagle import open_drafter
from lantern_hpu.models.files.checkpoint import open_checkpoint
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.files.names import PartOverrides, read_config
from lantern_hpu.models.model import ImageModel, Placement
from lantern_hpu.models.text.prefix import load_tokenizer
from lantern_hpu.results.outputs import read_saved_tokens
from lantern_hpu.zoo.find import find_parts
from lantern_lab.train.unroll import read_encoded, read_samples
from tests.marks import mostly_slow
from tests.tiny import tiny_config

State = dict[str, Tensor]
CLASS, TEXT, HUB = "llamagen-c2i", "llamagen-t2i-256", "llamagen-t2i-512"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"


@pytest.mark.parametrize("ending", [".incomplete", ".part", ".crdownload", ""])
def test_weights_that_are_half_there_are_named(ending: str, public: Path, tmp_path: Path) -> None:
    """By what a download calls them until they are whole; without an ending a link to nothing."""
    shutil.copytree(public / "janus-pro", tmp_path / "janus")
    file = tmp_path / "janus" / "pytorch_model.bin"
    file.rename(f"{file}{ending}" if ending else tmp_path / "elsewhere")
    says = f"pytorch_model.bin{ending} is not a whole file: its download broke off"
    if not ending:
        file.symlink_to("../../blobs/1f2e3d")
        says = "pytorch_model.bin cannot be read: it is a link to ../../blobs/1f2e3d"
    with pytest.raises(WeightsError, match=re.escape(says)):
        find_parts(str(file.parent))


def test_weights_without_their_description_ask_for_it(public: Path, tmp_path: Path) -> None:
    """As DeepSpeed's states of a training run."""
    weights = torch.load(public / "janus-pro" / "pytorch_model.bin", weights_only=True)
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": weights, "dp_world_size": 8}, file)
    with pytest.raises(WeightsError, match=r"config\.json next to it; of DeepSpeed's states"):
        open_model(find_parts(str(file)))


def test_a_description_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "model.json", "wb") as file:
        file.truncate(MOST_TEXT + 1)
    with pytest.raises(WeightsError, match=r"more than 1\.00 GB"):
        read_config(tmp_path)


def loaded(folder: Path, **parts: Any) -> ImageModel:
    named: dict[str, Any] = {name: str(path) for name, path in parts.items()}
    given = PartOverrides(**named)
    return open_model(find_parts(str(folder), given)).load(Placement())


def state_of(file: Path) -> State:
    stored = open_checkpoint(file)
    return {name: stored.read(name).clone() for name in stored.shapes}


def same(mine: torch.nn.Module | None, other: torch.nn.Module | None) -> bool:
    assert mine is not None and other is not None
    known = other.state_dict()
    return all(torch.equal(tensor, known[name]) for name, tensor in mine.state_dict().items())


@pytest.fixture(scope="module")
def plain(public: Path) -> ImageModel:
    return loaded(public / CLASS)


@pytest.fixture
def folder(public: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(public / CLASS, tmp_path / CLASS))


Rename = Callable[[str], str]
WRAPPED: dict[str, Rename] = {
    "compiled": lambda n: f"_orig_mod.{n}",
    "DDP": lambda n: f"module.{n}",
    "compiled in DDP": lambda n: f"module._orig_mod.{n}",
    "DDP compiled": lambda n: f"_orig_mod.module.{n}",
    "FSDP": lambda n: f"_fsdp_wrapped_module.{n}".replace(
        "layers.0.", "layers.0._fsdp_wrapped_module."
    ),
    "a part of a model": lambda n: f"model.{n}",
    "all of them": lambda n: f"module.model._fsdp_wrapped_module._orig_mod.{n}",
}


@pytest.mark.parametrize("how", mostly_slow(WRAPPED, "FSDP", "compiled in DDP"))
def test_what_training_wraps_around_names_is_left_out(
    how: str, public: Path, tmp_path: Path
) -> None:
    """Of target, tokenizer, drafter and text encoder."""
    folder, known = Path(shutil.copytree(public / TEXT, tmp_path / TEXT)), loaded(public / TEXT)
    for file in (*folder.glob("*.pt"), *folder.glob("*/*model.bin"), *folder.glob("text/*.safe*")):
        state = {WRAPPED[how](n): t for n, t in state_of(file).items()}
        save_file(state, file) if file.suffix == ".safetensors" else torch.save(state, file)
    mine, requests = loaded(folder), [Request("a cat")]
    for part in ("target", "vq", "drafter"):
        assert same(getattr(mine, part), getattr(known, part))
    assert mine.fingerprint == known.fingerprint
    rows, expected = (model.condition.rows(requests, True) for model in (mine, known))
    assert torch.equal(rows.embeddings, expected.embeddings)


@pytest.mark.parametrize(
    "name", ["anole", "janus-pro", "emu3-authors", "lumina-mgpt", "emu3.5-image"]
)
def test_a_model_that_was_part_of_another_is_read(name: str, public: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(public / name, tmp_path / name))
    known = open_model(find_parts(str(folder)))
    state = state_of(folder)
    for file in (*folder.glob("*.safetensors*"), *folder.glob("*.bin*")):
        file.unlink()
    save_file(
        {f"model.{n}": t.contiguous() for n, t in state.items()}, folder / "model.safetensors"
    )
    assert open_model(find_parts(str(folder))).config == known.config


def test_averaged_weights_alone_are_read_and_beside_others_named(
    folder: Path, plain: ImageModel
) -> None:
    file, state = folder / "c2i_B_256.pt", state_of(folder / "c2i_B_256.pt")
    other = {name: tensor + 1 for name, tensor in state.items()}
    torch.save({"ema": state, "steps": 3}, file)
    assert same(loaded(folder).target, plain.target) and not loaded(folder).notes
    torch.save({"ema": other, "model": state, "optimizer": {}}, file)
    mine = loaded(folder)
    assert same(mine.target, plain.target)
    assert mine.notes == [
        "c2i_B_256.pt holds weights under model and ema: model is read, as by LlamaGen's sampler"
    ]


# Pieces


def shards(folder: Path, state: State, index: bool) -> list[Path]:
    """Two files that divide a state."""
    names = sorted(state)
    result = [folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for file, part in zip(result, (names[::2], names[1::2]), strict=True):
        save_file({name: state[name].contiguous() for name in part}, file)
    if index:
        places = {n: result[i % 2].name for i, n in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return result


@pytest.fixture
def hub(public: Path, tmp_path: Path) -> tuple[Path, State]:
    """A folder in the Hugging Face layout without its weights, and those."""
    folder = Path(shutil.copytree(public / HUB, tmp_path / HUB))
    state = state_of(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    return folder, state


def test_shards_without_an_index_are_one_model(hub: tuple[Path, State], public: Path) -> None:
    folder, state = hub
    first, second = shards(folder, state, index=False)
    (folder / f"._{first.name}").write_bytes(b"\0\5\x16\7")
    known = loaded(public / HUB)
    assert same(loaded(folder).target, known.target)
    assert open_checkpoint(first).shapes.keys() == state.keys()
    second.unlink()
    for given in (folder, first):
        with pytest.raises(WeightsError, match=f"files are missing.*{second.name}"):
            loaded(given)
    save_file({name: state[name].contiguous() for name in state}, second)
    with pytest.raises(WeightsError, match="are not one model"):
        loaded(folder)


def test_a_whole_file_is_read_in_place_of_a_stale_index(
    hub: tuple[Path, State], public: Path
) -> None:
    folder, state = hub
    for file in shards(folder, {name: tensor + 1 for name, tensor in state.items()}, index=True):
        file.unlink()
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    assert same(loaded(folder).target, loaded(public / HUB).target)


def test_tensors_that_an_index_leaves_out_are_read(hub: tuple[Path, State], public: Path) -> None:
    folder, state = hub
    shards(folder, state, index=True)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    places.pop("model.norm.weight")
    index.write_text(json.dumps({"weight_map": places}))
    assert same(loaded(folder).target, loaded(public / HUB).target)
    index.write_text(
        json.dumps({"weight_map": places | {"model.more": next(iter(places.values()))}})
    )
    with pytest.raises(WeightsError, match=r"tensors are missing.*model\.more"):
        loaded(folder)


def test_a_tied_head_is_the_embedding(hub: tuple[Path, State]) -> None:
    folder, state = hub
    state.pop("lm_head.weight")
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight"):
        loaded(folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"tie_word_embeddings": True}))
    shutil.rmtree(folder / "drafter")
    target = loaded(folder).target
    assert torch.equal(target.state_dict()["head.weight"], target.state_dict()["embed.weight"])


# What is no weights file


@pytest.mark.parametrize(("content", "says"), [(POINTER, "git lfs pull"), (PAGE, "web page")])
@pytest.mark.parametrize(
    "name", ["x.safetensors", "x.pt", "x.bin", "x.npz", "tokenizer.json", "config.json"]
)
def test_pointers_and_pages_are_named_in_every_kind_of_file(
    content: bytes, says: str, name: str, tmp_path: Path, public: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    if name == "config.json":
        shutil.copy(public / CLASS / "c2i_B_256.pt", tmp_path)
    readers: dict[str, Callable[[Path], Any]] = {
        "x.npz": read_saved_tokens,
        "tokenizer.json": lambda file: load_tokenizer(file.parent),
        "config.json": lambda file: loaded(file.parent),
    }
    read = readers.get(name, open_checkpoint)
    with pytest.raises(WeightsError) as refused:
        read(file)
    assert says in str(refused.value) and name in str(refused.value)


READERS: dict[str, Callable[[Path], Any]] = {
    "x.safetensors": open_checkpoint,
    "x.pt": open_checkpoint,
    "x.npz": read_saved_tokens,
    "samples.npz": lambda file: read_samples(file, "", 1, tiny_config()),
    "captioned.npz": lambda file: read_encoded(file, tiny_config(), ()),
    "model.json": lambda file: read_config(file.parent),
    "drafter.json": lambda file: open_drafter(file.parent, tiny_config()),
}


@pytest.mark.parametrize("name", READERS)
def test_pipes_and_devices_under_a_files_name_are_refused(name: str, tmp_path: Path) -> None:
    """And not waited for: the writer of a pipe may never come, and a device has no end."""
    file = tmp_path / name
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it is waited for"))
    for make in (os.mkfifo, lambda file: file.symlink_to("/dev/zero")):
        make(file)
        signal.alarm(5)
        with pytest.raises(WeightsError):
            READERS[name](file)
        signal.alarm(0)
        file.unlink()
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.to("meta"),
        Tensor.to_sparse,
        Tensor.to_sparse_csr,
        torch._neg_view,
        lambda weight: torch.nested.nested_tensor([weight, weight]),
    ],
    ids=["meta", "sparse", "csr", "negated", "nested"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_a_pickle_that_are_no_plain_arrays_are_refused(
    change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    torch.save({"model": {"a": torch.ones(2), "b": change(torch.ones(2, 2))}}, tmp_path / "x.pt")
    with pytest.raises(WeightsError, match="not plain arrays of numbers: b"):
        open_checkpoint(tmp_path / "x.pt")


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch before 2.8 has none")
def test_formats_that_torch_cannot_turn_into_another_are_refused_by_name(folder: Path) -> None:
    file = folder / "c2i_B_256.pt"
    state = state_of(file)
    name = next(name for name in state if "wqkv" in name)
    state[name] = state[name].to(torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.save({"model": state}, file)
    with pytest.raises(WeightsError, match=r"wqkv.* holds torch\.float4"):
        loaded(folder)


# Drafters


def drafter_of(public: Path, tmp_path: Path, state: State, **about: Any) -> Path:
    folder = Path(shutil.copytree(public / HUB / "drafter", tmp_path / "drafter"))
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | about))
    return folder


def test_a_drafter_without_a_bias_has_one_of_zeros(public: Path, tmp_path: Path) -> None:
    state = load_file(public / HUB / "drafter" / "model.safetensors")
    state.pop("fc.bias")
    state["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    made = drafter_of(public, tmp_path, state, bias=False)
    drafter = loaded(public / HUB, drafter=made).drafter
    assert drafter is not None and not drafter.fc.bias.any()
    shutil.rmtree(made)
    with pytest.raises(WeightsError, match=r"fc\.bias"):
        loaded(public / HUB, drafter=drafter_of(public, tmp_path, state))


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("midlayer.hidden_norm.weight", "d2t"), "EAGLE-3"),
        (("0.0.linear.weight", "0.1.weight"), "Medusa"),
    ],
)
def test_drafters_of_other_kinds_are_refused_by_name(
    names: tuple[str, ...], kind: str, public: Path, tmp_path: Path
) -> None:
    made = drafter_of(public, tmp_path, {name: torch.zeros(4, 4) for name in names})
    with pytest.raises(WeightsError, match=kind):
        loaded(public / HUB, drafter=made)
