"""Lumina-mGPT 2.0: logits and greedy tokens are those of transformers' Chameleon, pictures those of diffusers' MoVQ."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_hpu import cli
from lantern_hpu.commands import convert
from lantern_hpu.core import Request, Sampling
from lantern_hpu.models.files.checkpoint import open_checkpoint
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.vq import count_decoder
from lantern_hpu.pipeline import LanternPipeline
from tests.marks import mostly_slow
from tests.published import PROMPTS, guided_rows, lumina2, lumina2_rows, obeys, opened

NAME, SCALE, SIDE = "lumina-mgpt-2.0", 4.0, 64
FIRST, CODES, END = 155000, 16384, 151670
SMALL = ("--image-size", str(SIDE))  # 8 x 8 codes, so that a test draws a picture in a second


def as_published(tokens: Tensor) -> Tensor:
    return torch.where(tokens == CODES, END, tokens + FIRST)


def test_a_prompt_is_framed_token_for_token(public: Path) -> None:
    model: Any = opened(public / NAME)
    for height, width in ((768, 768), (512, 1024)):
        grid = model.config.target.of_grid((height // 8, width // 8))
        frame = model.condition.sized(grid).frame
        for prompt in (*PROMPTS, ""):
            ids, without = lumina2_rows(public / NAME, prompt, height, width)
            assert frame.ids(prompt) == ids and frame.without(ids) == without
    assert model.config.target.tokens == 9312
    assert model.condition.frame.ids("red")[-2:] == [151700 + 24] * 2


@pytest.mark.parametrize(
    ("settings", "first"),
    [({"bos_token": "<|im_start|>"}, 151644), ({"eos_token": {"content": "<|im_end|>"}}, 151645)],
)
def test_a_prompt_begins_as_the_tokenizer_says(
    public: Path, tmp_path: Path, settings: dict[str, Any], first: int
) -> None:
    """With its first token, or with its last; a converted folder keeps that."""
    folder = shutil.copytree(public / NAME, tmp_path / "other")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert convert.main([str(folder), str(tmp_path / "ours")]) == 0
    for place in (folder, tmp_path / "ours"):
        condition: Any = opened(place).condition
        assert condition.frame.ids("red")[0] == first


@torch.no_grad()
@pytest.mark.parametrize("method", mostly_slow(["scd@4", "ar", "jacobi", "sjd-pac"], "scd@4"))
def test_greedy_tokens_are_those_of_transformers(public: Path, method: str) -> None:
    """Prompts of unequal lengths in one batch; windows draw what `ar` draws, with nothing captured on the way."""
    pipe = LanternPipeline.from_pretrained(
        str(public / NAME), given=PartOverrides(image_size=SIDE), device="cpu", dtype="float32"
    )
    requests = [Request(p, i, Sampling(SCALE, 0.0)) for i, p in enumerate(PROMPTS)]
    result = pipe.draw(requests, pipe.resolve(method))
    model, drawn = lumina2(public / NAME), torch.from_numpy(result.tokens)
    assert drawn.shape == (3, 72) and len(drawn.unique()) > 8
    for prompt, tokens in zip(PROMPTS, drawn, strict=True):
        rows, image = lumina2_rows(public / NAME, prompt, SIDE, SIDE), as_published(tokens)
        logits = guided_rows(model.model, model.lm_head, rows, image.tolist(), SCALE)
        assert torch.equal(obeys(logits, 8, END, slice(FIRST, FIRST + CODES)), image)


DIFFUSERS = (
    (r"^decoder\.mid\.block_(\d)", lambda m: f"decoder.mid_block.resnets.{int(m[1]) - 1}"),
    (r"^decoder\.mid\.attn_1", lambda m: "decoder.mid_block.attentions.0"),
    (r"^decoder\.up\.(\d)\.block\.", lambda m: f"decoder.up_blocks.{3 - int(m[1])}.resnets."),
    (r"^decoder\.up\.(\d)\.attn\.", lambda m: f"decoder.up_blocks.{3 - int(m[1])}.attentions."),
    (
        r"^decoder\.up\.(\d)\.upsample\.",
        lambda m: f"decoder.up_blocks.{3 - int(m[1])}.upsamplers.0.",
    ),
    (r"^decoder\.norm_out", lambda m: "decoder.conv_norm_out"),
    (r"\.norm\.(norm_layer|conv_y|conv_b)\.", lambda m: f".spatial_norm.{m[1]}."),
    (r"\.(q|k|v)\.(\w+)$", lambda m: f".to_{m[1]}.{m[2]}"),
    (r"\.proj_out\.", lambda m: ".to_out.0."),
    (r"\.nin_shortcut\.", lambda m: ".conv_shortcut."),
)


def movq(folder: Path) -> Any:
    """diffusers' decoder of MoVQGAN's kind, in float64."""
    from diffusers import VQModel

    file, state = open_checkpoint(folder / "movqgan_270M.ckpt"), {}
    for name in file.shapes:
        if name.startswith(("decoder.", "post_quant_conv.", "quantize.")):
            own = name
            for old, new in DIFFUSERS:
                own = re.sub(old, new, own)
            tensor = file.read(name)
            flat = re.search(r"\.to_(q|k|v|out\.0)\.weight$", own)
            state[own] = tensor[:, :, 0, 0] if flat else tensor
    ups = ("AttnUpDecoderBlock2D", *["UpDecoderBlock2D"] * 3)
    model: Any = VQModel(
        block_out_channels=(32, 32, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=ups,
        layers_per_block=1,
        latent_channels=4,
        vq_embed_dim=4,
        num_vq_embeddings=CODES,
        norm_type="spatial",
    )
    lacks, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and all(n.startswith(("encoder.", "quant_conv.")) for n in lacks)
    return model.double().eval()


@torch.no_grad()
def test_pictures_are_those_of_diffusers(public: Path) -> None:
    """Far within one of 255 levels, on a grid that is not square; the encoder is left aside."""
    pytest.importorskip("diffusers")
    vq, twin = opened(public / NAME).vq, movq(public / NAME)
    assert vq is not None
    codes = torch.randint(CODES, (2, 15), generator=torch.Generator().manual_seed(2))
    z = twin.quantize.embedding(codes.view(2, 3, 5)).permute(0, 3, 1, 2)
    want = twin.decode(z, force_not_quantize=True).sample
    mine = vq.decode_codes(codes, (3, 5))
    assert mine.shape == (2, 3, 24, 40) and want.std() > 0.1
    torch.testing.assert_close(mine, want.clamp(-1, 1).float(), rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in vq.parameters()) == count_decoder(vq.config)
    assert vq.config.downsample == 8


@pytest.mark.slow
def test_guidance_that_its_authors_change_while_they_draw_is_reported(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each scale once; the default, and none at all, are the same at every token of theirs."""
    pipe = LanternPipeline.from_pretrained(
        str(public / NAME), given=PartOverrides(image_size=SIDE), device="cpu", dtype="float32"
    )
    requests = [Request(p, 0, Sampling(scale)) for scale in (1.0, 4.0, 7.5, 3.0) for p in PROMPTS]
    rules = [re.search(r"guidance is .* max\(.*", note) for _, note in pipe.notes(requests)]
    assert [rule and rule[0] for rule in rules] == [
        f"guidance is {scale} at every token; its authors draw each with max(4, {scale} x (1 - drawn / total))"
        for scale in ("3", "7.5")
    ]
    with pytest.warns(UserWarning, match="guidance is 6 at every token"):
        result = pipe("red", guidance_scale=6.0, method="scd@4")
    assert len(result.notes) == 1
    command = ["generate", "--model", str(public / NAME), "--prompt", "red", "--method", "scd@4"]
    size, where = ["--height", "64", "--width", "64"], ["--output", str(tmp_path / "x.png")]
    for scale, said in ((4, False), (6, True)):
        assert cli.main([*command, *size, *where, "--cfg-scale", str(scale), "--force"]) == 0
        assert ("warning: 'red': guidance is 6" in capsys.readouterr().err) == said
