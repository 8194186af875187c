"""SimpleAR: logits are those of transformers' Qwen2, pictures those of the tokenizer's network of three dimensions."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lantern_hpu.commands import generate
from lantern_hpu.core import Request, Sampling
from lantern_hpu.errors import WeightsError
from lantern_hpu.methods.setting import Setting
from lantern_hpu.models.files.checkpoint import open_checkpoint
from lantern_hpu.models.model import nearest_codes
from lantern_hpu.models.vq import fsq_table
from tests.marks import mostly_slow
from tests.published import (
    PROMPTS,
    guided_logits,
    guided_rows,
    opened,
    pipeline_of,
    simplear,
    simplear_rows,
    with_settings,
)

NAME, FIRST, SCALE = "simplear", 151672, 6.0
AR = Setting.parse("ar")


def untied(public: Path, goal: Path) -> Path:
    """The same with a head of its own."""
    shutil.copytree(public / NAME, goal, ignore=shutil.ignore_patterns("model.safetensors"))
    state = load_file(public / NAME / "model.safetensors")
    assert "lm_head.weight" not in state
    head = state["model.embed_tokens.weight"].flip(1).contiguous()
    save_file(state | {"lm_head.weight": head}, goal / "model.safetensors", {"format": "pt"})
    config = json.loads((goal / "config.json").read_text())
    (goal / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return goal


@torch.no_grad()
def test_a_head_of_its_own_has_the_logits_of_transformers(public: Path, tmp_path: Path) -> None:
    folder = untied(public, tmp_path / "untied")
    model, tokens = simplear(folder), torch.randint(64000, (len(PROMPTS), 24))
    mine = guided_logits(opened(folder), PROMPTS, tokens, SCALE)
    for prompt, row, logits in zip(PROMPTS, tokens, mine, strict=True):
        rows, image = simplear_rows(folder, prompt), (row + FIRST).tolist()
        want = guided_rows(model.model, model.lm_head, rows, image, SCALE)[:, FIRST:]
        assert want.std() > 0.5
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


def test_the_table_is_the_head_unless_config_json_says_that_it_is_not(
    public: Path, tmp_path: Path
) -> None:
    folder = with_settings(public / NAME, tmp_path / "untied", tie_word_embeddings=False)
    with pytest.raises(WeightsError, match=r"1 tensors missing \(lm_head.weight\)"):
        opened(folder)


@torch.no_grad()
@pytest.mark.parametrize("setting", mostly_slow([AR, Setting.parse("scd@4")], AR))
def test_greedy_tokens_are_those_of_transformers(public: Path, setting: Setting) -> None:
    """Prompts of unequal lengths in one batch."""
    pipeline, model = pipeline_of(public / NAME), simplear(public / NAME)
    requests = [Request(p, 0, Sampling(SCALE, 0.0)) for p in PROMPTS]
    tree = pipeline.resolve(setting).tree
    engine = pipeline.engines.make(pipeline.spec(requests, tree, 3), "strict")
    known = engine.prefill_batch(pipeline.model.condition.rows(requests, True), requests)
    number = 1
    while min(known[:3]) < 12:
        known, number = engine.run_steps_and_read([0, 0, 0], number, 1), number + 1
    for prompt, row in zip(PROMPTS, torch.from_numpy(engine.read_tokens()[:3, :12]), strict=True):
        rows, image = simplear_rows(public / NAME, prompt), (row + FIRST).tolist()
        want = guided_rows(model.model, model.lm_head, rows, image, SCALE)[:, FIRST:]
        assert torch.equal(want.argmax(-1), row.long())


def tokenizer_twin(folder: Path) -> nn.Module:
    """In float64."""
    from tests.checkpoints.simplear import cosmos_decoder

    twin = cosmos_decoder(torch.Generator())
    file = open_checkpoint(folder / "decoder.jit")
    state = {name: file.read(name) for name in twin.state_dict()}
    twin.load_state_dict(state)
    twin.inv_quant.quantizer.dtype = torch.float64
    double: nn.Module = twin.double()
    return double


@torch.no_grad()
def test_pictures_are_those_of_the_network_of_three_dimensions(public: Path) -> None:
    vq, twin = opened(public / NAME).vq, tokenizer_twin(public / NAME)
    assert vq is not None
    codes = torch.randint(64000, (2, 15), generator=torch.Generator().manual_seed(2))
    vq.double()  # rounding aside
    mine, want = vq.decode_codes(codes, (3, 5)), twin(codes.view(2, 1, 3, 5))
    assert mine.shape == (2, 3, 48, 80) and want.shape == (2, 3, 1, 48, 80) and want.std() > 0.1
    torch.testing.assert_close(mine, want[:, :, 0].clamp(-1, 1).float(), rtol=1e-5, atol=1e-5)
    assert vq.config.downsample == 16


def test_codes_are_digits_and_ties_go_by_code() -> None:
    """Code 9 is the digits 1, 1, 0, 0, 0, 0, each counted from the middle of its levels."""
    table = fsq_table((8, 8, 8, 5, 5, 5))
    assert table.shape == (64000, 6)
    assert table[9].tolist() == [-0.75, -0.75, -1, -1, -1, -1]
    assert table[-1].tolist() == [0.75, 0.75, 0.75, 1, 1, 1]
    small = nearest_codes(fsq_table((8, 8)), 4)
    assert small[9].tolist() == [1, 8, 10, 17]  # all at one distance


class Poison:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def test_a_torchscript_file_is_read_and_never_run(
    public: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import pickle

    monkeypatch.chdir(tmp_path)
    file = tmp_path / "decoder.jit"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("decoder/data.pkl", pickle.dumps(Poison()))
    open_checkpoint(file)
    assert not Path("ran").exists()
    whole = (public / NAME / "decoder.jit").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"<html>"):
        file.write_bytes(damaged)
        args = [
            "--model",
            str(public / NAME),
            "--vq",
            str(file),
            "--prompt",
            "red",
            "--method",
            "ar",
        ]
        assert generate.main([*args, "--output", "x.png"]) == 2
        assert f"cannot read {file}" in capsys.readouterr().err
