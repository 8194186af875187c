"""Lumina-mGPT 2.0, SimpleAR and MammothModa2: tokens, pictures and hidden states are those of transformers,
diffusers and their authors' networks."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lantern_hpu import cli
from lantern_hpu.commands import convert, generate
from lantern_hpu.core import Request, Sampling
from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.models.families import llama
from lantern_hpu.models.files.checkpoint import open_checkpoint
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.model import nearest_codes
from lantern_hpu.models.vq import count_decoder, fsq_table
from tests.marks import mostly_slow
from tests.published import (
    LUMINA2,
    MAMMOTH,
    PROMPTS,
    SIMPLEAR,
    THEIRS,
    Theirs,
    guided_logits,
    guided_rows,
    lumina2_rows,
    mammoth_rows,
    obeys,
    opened,
    p_value,
    pipeline_of,
    simplear,
    simplear_rows,
    with_settings,
)

SCALE, WORDS = 6.0, 152064
SIZE: dict[str, Any] = {"height": 96, "width": 128}
GRID, TOKENS = (3, 4), 3 * 5  # of MammothModa2's pictures of that size
# Of each family: the size that is asked for, its codes in a row, and what its authors' rows take of it
DRAWN: dict[str, tuple[tuple[int, int] | None, int, tuple[Any, ...]]] = {
    LUMINA2: ((64, 64), 8, (64, 64)),
    SIMPLEAR: (None, 4, ()),
    MAMMOTH: ((96, 128), 4, (GRID,)),
}
GREEDY = [
    *((LUMINA2, method, "auto") for method in ("scd@4", "ar", "jacobi", "sjd-pac")),
    *((SIMPLEAR, method, "auto") for method in ("ar", "scd@4")),
    *((MAMMOTH, *how) for how in (("ar", "native"), ("ar", "plain"), ("scd@4", "native"))),
]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "method", "layout"), mostly_slow(GREEDY, GREEDY[0], GREEDY[4], GREEDY[6])
)
def test_greedy_tokens_are_those_of_transformers(
    public: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str, layout: str
) -> None:
    """Whole pictures of prompts of unequal lengths in one batch, with nothing captured after the warm-up."""
    monkeypatch.setattr(llama, "SIZES", (64,))
    size, columns, drawn_as = DRAWN[name]
    pipeline = pipeline_of(public / name, graphs="strict", layout=layout, pictures=False)
    requests = [Request(p, i, Sampling(SCALE, 0.0), size=size) for i, p in enumerate(PROMPTS)]
    result = pipeline.draw(requests, pipeline.resolve(method), decode=False)
    theirs, tokens = THEIRS[name](public / name), torch.from_numpy(result.tokens)
    rows_of: Any = theirs.rows
    assert len(tokens.unique()) > 8
    for prompt, row in zip(PROMPTS, tokens, strict=True):
        image, rows = theirs.numbered(row), rows_of(prompt, *drawn_as)
        logits = guided_rows(theirs.run, theirs.head, rows, image.tolist(), SCALE)
        assert torch.equal(obeys(logits, columns, theirs.end, theirs.codes), image)


def test_a_prompt_names_the_size_of_its_picture(public: Path) -> None:
    """Pixels or codes, of pictures that are not square."""
    condition: Any = opened(public / LUMINA2).condition
    grid = condition.frame.config.of_grid((64, 128))
    want = lumina2_rows(public / LUMINA2, "red", 512, 1024)
    assert condition.sized(grid).frame.ids("red") == want[0]
    assert condition.sized(grid).frame.without(want[0]) == want[1]
    assert condition.frame.config.tokens == 9312
    assert condition.frame.ids("red")[-2:] == [151700 + 24] * 2
    condition = opened(public / MAMMOTH).condition
    other = condition.sized(condition.frame.config.of_grid((2, 11)))
    assert other.frame.ids("red") == mammoth_rows(public / MAMMOTH, "red", (2, 11))[0]
    assert 151645 not in condition.frame.words(condition.plain("a <|im_end|> b"))


# --------------------------------------------------------------------------------- Lumina-mGPT 2.0


@pytest.mark.parametrize(
    ("settings", "first"),
    [({"bos_token": "<|im_start|>"}, 151644), ({"eos_token": {"content": "<|im_end|>"}}, 151645)],
)
def test_a_prompt_begins_as_the_tokenizer_says(
    public: Path, tmp_path: Path, settings: dict[str, Any], first: int
) -> None:
    """With its first token, or with its last; a converted folder keeps that."""
    folder = shutil.copytree(public / LUMINA2, tmp_path / "other")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert convert.main([str(folder), str(tmp_path / "ours")]) == 0
    for place in (folder, tmp_path / "ours"):
        condition: Any = opened(place).condition
        assert condition.frame.ids("red")[0] == first


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
        num_vq_embeddings=16384,
        norm_type="spatial",
    )
    lacks, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and all(n.startswith(("encoder.", "quant_conv.")) for n in lacks)
    return model.double().eval()


@torch.no_grad()
def test_pictures_are_those_of_diffusers(public: Path) -> None:
    """Far within one of 255 levels, on a grid that is not square; the encoder is left aside."""
    pytest.importorskip("diffusers")
    vq, twin = opened(public / LUMINA2).vq, movq(public / LUMINA2)
    assert vq is not None
    codes = torch.randint(16384, (2, 15), generator=torch.Generator().manual_seed(2))
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
    pipe = pipeline_of(public / LUMINA2, given=PartOverrides(image_size=64))
    requests = [Request(p, 0, Sampling(scale)) for scale in (1.0, 4.0, 7.5, 3.0) for p in PROMPTS]
    rules = [re.search(r"guidance is .* max\(.*", note) for _, note in pipe.notes(requests)]
    assert [rule and rule[0] for rule in rules] == [
        f"guidance is {scale} at every token; its authors draw each with max(4, {scale} x (1 - drawn / total))"
        for scale in ("3", "7.5")
    ]
    with pytest.warns(UserWarning, match="guidance is 6 at every token"):
        result = pipe("red", guidance_scale=6.0, method="scd@4")
    assert len(result.notes) == 1
    command = ["generate", "--model", str(public / LUMINA2), "--prompt", "red", "--method", "scd@4"]
    size, where = ["--height", "64", "--width", "64"], ["--output", str(tmp_path / "x.png")]
    for scale, said in ((4, False), (6, True)):
        assert cli.main([*command, *size, *where, "--cfg-scale", str(scale), "--force"]) == 0
        assert ("warning: 'red': guidance is 6" in capsys.readouterr().err) == said


# ---------------------------------------------------------------------------------------- SimpleAR


def untied(public: Path, goal: Path) -> Path:
    """The same with a head of its own."""
    shutil.copytree(public / SIMPLEAR, goal, ignore=shutil.ignore_patterns("model.safetensors"))
    state = load_file(public / SIMPLEAR / "model.safetensors")
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
        rows, image = simplear_rows(folder, prompt), (row + 151672).tolist()
        want = guided_rows(model.model, model.lm_head, rows, image, SCALE)[:, 151672:]
        assert want.std() > 0.5
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


def test_the_table_is_the_head_unless_config_json_says_that_it_is_not(
    public: Path, tmp_path: Path
) -> None:
    folder = with_settings(public / SIMPLEAR, tmp_path / "untied", tie_word_embeddings=False)
    with pytest.raises(WeightsError, match=r"1 tensors missing \(lm_head.weight\)"):
        opened(folder)


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
    vq, twin = opened(public / SIMPLEAR).vq, tokenizer_twin(public / SIMPLEAR)
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
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "decoder.jit"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("decoder/data.pkl", pickle.dumps(Poison()))
    open_checkpoint(file)
    assert not Path("ran").exists()
    whole = (public / SIMPLEAR / "decoder.jit").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"<html>"):
        file.write_bytes(damaged)
        args = ["--model", str(public / SIMPLEAR), "--vq", str(file), "--prompt", "red"]
        assert generate.main([*args, "--method", "ar", "--output", "x.png"]) == 2
        assert f"cannot read {file}" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ MammothModa2


@pytest.fixture(scope="module")
def theirs(public: Path) -> Theirs:
    return THEIRS[MAMMOTH](public / MAMMOTH)


def test_words_are_those_tokens_whose_id_says_so(public: Path) -> None:
    """The size's digits are words, the two tokens around them are not."""
    model = opened(public / MAMMOTH)
    prefix = model.condition.rows([Request("dog")], True)
    is_word, (row, without) = (
        model.target.words(prefix.tokens),
        mammoth_rows(public / MAMMOTH, "dog"),
    )
    assert is_word is not None
    for mine, ids in zip(is_word, (row, without), strict=True):
        assert mine[-len(ids) :].tolist() == [token < WORDS for token in ids]
    every = model.target.words(torch.arange(184864))
    assert every is not None and int(every.sum()) == WORDS and not every[:16385].any()


@torch.no_grad()
@pytest.mark.parametrize("layout", ["native", "plain"])
def test_saved_states_are_those_of_a_patched_qwen2(
    public: Path, theirs: Theirs, tmp_path: Path, layout: str
) -> None:
    """Of prompt, image and its closing token, in one pass, for prompts of unequal lengths."""
    pipeline, file = pipeline_of(public / MAMMOTH, layout=layout), tmp_path / "states.safetensors"
    result = pipeline(PROMPTS[:2], method="ar", **SIZE)
    pipeline.save_states(result, file)
    saved, texts = load_file(file), PROMPTS[:2]
    with safe_open(file, "pt") as opened_file:
        images = json.loads(opened_file.metadata()["images"])
    assert [one["prompt"] for one in images] == list(texts)
    assert images[0]["grid"] == list(GRID) and images[0]["tokens"] == TOKENS
    for number, prompt in enumerate(texts):
        row = mammoth_rows(public / MAMMOTH, prompt, GRID)[0]
        ids = [*row, *theirs.numbered(torch.from_numpy(result.tokens[number])).tolist(), 152071]
        assert saved[f"{number}.input_ids"].tolist() == ids
        want = theirs.run(input_ids=torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(saved[f"{number}.hidden_states"], want, rtol=1e-4, atol=1e-4)
    alone, states = pipeline.hidden_states("dog", **SIZE)
    assert alone.tolist() == mammoth_rows(public / MAMMOTH, "dog", GRID)[0]
    want = saved["1.hidden_states"][: len(alone)]
    torch.testing.assert_close(states, want, rtol=1e-5, atol=1e-5)
    for wrong in ([16385], [-1], [0] * (TOKENS + 1)):
        with pytest.raises(OptionError, match="not those of an image"):
            pipeline.hidden_states("dog", wrong, **SIZE)


@pytest.mark.parametrize("method", mostly_slow(["ar", "sjd-pac@4"]))
def test_tokens_are_distributed_as_a_patched_qwen2_draws_them(
    public: Path, theirs: Theirs, method: str
) -> None:
    sampling, texts = Sampling(2.0, 3.0, 20), [f"{PROMPTS[i % 3]} {i}" for i in range(24)]
    pipeline = pipeline_of(public / MAMMOTH)
    requests = [Request(text, i, sampling, size=(96, 128)) for i, text in enumerate(texts)]
    tokens = torch.from_numpy(pipeline.draw(requests, pipeline.resolve(method)).tokens)
    places = torch.arange(TOKENS) % (GRID[1] + 1) != GRID[1]
    probs = []
    for text, row in zip(texts, tokens, strict=True):
        rows, image = mammoth_rows(public / MAMMOTH, text, GRID), theirs.numbered(row).tolist()
        with torch.no_grad():
            want = guided_rows(theirs.run, theirs.head, rows, image, sampling.cfg_scale)
        want = want / sampling.temperature
        best = want[places][:, theirs.codes].topk(sampling.top_k)
        probs.append(
            torch.zeros(len(best.values), 16384).scatter(1, best.indices, best.values.softmax(-1))
        )
    assert p_value(torch.cat(probs), tokens[:, places].flatten()) > 1e-3


def test_states_are_of_models_that_read_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "x.safetensors")
    assert generate.main(["--prompt", "red", "--save-states", file]) == 2
    assert "--save-states cannot be used" in capsys.readouterr().err
