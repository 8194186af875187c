"""Language models that draw: each equals transformers' own class on small random weights, and draws by every method.

The files are those of `tests/checkpoints/language_models.py`; the loader does not know them, transformers wrote them.
"""

from __future__ import annotations

import json
import shutil
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from lantern_hpu import cli
from lantern_hpu.backends.base import DevicePlan, get_backend
from lantern_hpu.commands import convert, generate
from lantern_hpu.core import Request, Sampling
from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.methods.setting import Setting
from lantern_hpu.models.config import DrafterConfig
from lantern_hpu.models.families.chameleon import CHAMELEON
from lantern_hpu.models.families.glm_image import GLM_IMAGE
from lantern_hpu.models.families.llama import MAMMOTHMODA2
from lantern_hpu.models.files.checkpoint import shapes_only
from lantern_hpu.models.files.load import make_condition, open_model
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.model import ImageModel, Placement, of_size
from lantern_hpu.models.text.prefix import TokenConditioner
from lantern_hpu.models.transformer import Target
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.zoo.find import find_parts
from lantern_lab.train.drafter_training import like_the_target
from lantern_lab.train.unroll import Lesson, Unrolled
from lantern_lab.verify.distribution import measure
from scripts.serving import serving
from tests.checkpoints.files import write_shards
from tests.marks import mostly_slow
from tests.published import (
    ANOLE,
    AUTHORS_EMU3,
    EMU3,
    EMU35_IMAGE,
    HUB_JANUS,
    JANUS,
    LUMINA,
    MAMMOTH,
    PROMPTS,
    SIMPLEAR,
    SWIN,
    THEIRS,
    a_row_a_head,
    drafted,
    emu3,
    emu3_ids,
    emu3_rows,
    guided_logits,
    guided_rows,
    janus,
    lumina_ids,
    lumina_state,
    obeys,
    opened,
    pipeline_of,
    simplear_rows,
    small_pictures,
    with_settings,
)

MODELS = (JANUS, HUB_JANUS, LUMINA, EMU3, AUTHORS_EMU3)
SIDES = dict(zip(MODELS, (128, 128, 512, 64, 64), strict=True))  # pixels


def greedy(
    folder: Path, prompts: Sequence[str], scale: float, method: str = "ar", **how: Any
) -> Tensor:
    """Tokens of one batch [B, N], at temperature 0."""
    settings = Sampling(scale, 0.0)
    requests = [Request(prompt, i, settings) for i, prompt in enumerate(prompts)]
    pipeline = pipeline_of(folder, **how)
    result = pipeline.draw(requests, pipeline.resolve(Setting.parse(method)))
    return torch.from_numpy(result.tokens)


# ------------------------------------------------------------------------------------ Janus-Pro


def same_model(one: ImageModel, other: ImageModel) -> None:
    assert one.fingerprint == other.fingerprint and one.config == other.config
    for part in ("target", "vq"):
        mine, theirs = getattr(one, part).state_dict(), getattr(other, part).state_dict()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_long_prompt_is_cut_before_the_frame_ends(public: Path) -> None:
    condition = opened(public / JANUS).condition
    assert isinstance(condition, TokenConditioner)
    ids = condition.frame.ids("red " * 400)
    assert (
        len(ids) == 256 and ids[-len(condition.frame.closing) - 1 : -1] == condition.frame.closing
    )
    assert "left out" in condition.notes("red " * 400)[0] and not condition.notes("red")


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "codes", "grid"), [(HUB_JANUS, 64, (8, 8)), (EMU3, 32768, (12, 5))]
)
def test_codes_are_decoded_as_transformers_does(
    public: Path, name: str, codes: int, grid: tuple[int, int]
) -> None:
    """Of Emu3 the first of four frames; the others are never computed here."""
    drawn = torch.randint(codes, (2, *grid), generator=torch.Generator().manual_seed(2))
    vq = opened(public / name).vq
    assert vq is not None
    if name == EMU3:
        want = emu3(public / name).model.vqmodel.decode(drawn)
    else:
        want = janus(public / name).decode_image_tokens(drawn.flatten(1)).permute(0, 3, 1, 2)
    mine = vq.decode_codes(drawn.flatten(1), grid)
    assert want.std() > 0.1
    torch.testing.assert_close(mine, want.clamp(-1, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("version", [4, 5])
def test_janus_4o_loads_as_its_authors_class_is_saved(
    public: Path, tmp_path: Path, version: int
) -> None:
    """Janus-Pro's names in safetensors: shards and an index by transformers 4, one file and moved options by 5."""
    state = torch.load(public / JANUS / "pytorch_model.bin", weights_only=True)
    shutil.copytree(public / JANUS, tmp_path / "4o", ignore=shutil.ignore_patterns("*.bin"))
    config = json.loads((tmp_path / "4o" / "config.json").read_text())
    if version == 4:
        write_shards(tmp_path / "4o", state, 3)
    else:
        save_file(
            {n: t.contiguous() for n, t in state.items()}, tmp_path / "4o" / "model.safetensors"
        )
        rope = {"rope_theta": 10000.0, "rope_type": "default"}
        config["language_config"] |= {"rope_parameters": rope, "dtype": "bfloat16"}
        (tmp_path / "4o" / "config.json").write_text(json.dumps(config))
    other = opened(tmp_path / "4o")
    same_model(opened(public / JANUS), other)
    assert other.sampling == Sampling(5.0, 1.0, 0, 1.0)


# ------------------------------------------------------------------------------------ Lumina-mGPT


def lumina_saved_again(public: Path, goal: Path) -> Path:
    """By transformers, which writes a row of each norm a head; only a name tells it from Anole."""
    shutil.copytree(public / LUMINA, goal, ignore=shutil.ignore_patterns("model*", "drafter"))
    save_file(a_row_a_head(lumina_state(public / LUMINA)), goal / "model.safetensors")
    return goal


def test_norms_of_one_row_are_those_of_a_row_a_head(public: Path, tmp_path: Path) -> None:
    one, other = opened(public / LUMINA), opened(lumina_saved_again(public, tmp_path / "again"))
    assert one.config.target == other.config.target and one.fingerprint == other.fingerprint
    assert all(
        torch.equal(one.target.state_dict()[n], t) for n, t in other.target.named_parameters()
    )


def test_lumina_is_recognised_without_its_name(public: Path, tmp_path: Path) -> None:
    """By norms that serve all heads; a row a head and no name is Anole's format."""
    again = lumina_saved_again(public, tmp_path / "again")
    bare = Path(shutil.copytree(public / LUMINA, tmp_path / "bare"))
    for folder, frame in ((bare, "lumina"), (again, "anole")):
        about = json.loads((folder / "config.json").read_text())
        del about["z_loss_weight"], about["_name_or_path"]
        (folder / "config.json").write_text(json.dumps(about))
        parts = find_parts(str(folder), PartOverrides(image_size=512))
        assert open_model(parts).config.condition.frame == frame


@torch.no_grad()
def test_luminas_published_drafter_equals_its_twin(public: Path) -> None:
    """Rows of its table in the target's order, one norm for both heads, words in its prefill."""
    from tests import numpy_twins as twins

    model = opened(public / LUMINA)
    config, drafter = model.target.config, model.drafter
    assert drafter is not None and drafter.drafter_config == DrafterConfig(True, False, shift=0)
    own = twins.arrays(a_row_a_head(lumina_state(public / LUMINA / "drafter")))
    tokens = torch.tensor([[3, 0, 8191, 8192, 5]])
    image = [3 + 4, 4, 8195, 8803, 5 + 4]
    prefix = model.condition.rows([Request("a cat")], False)
    hidden = torch.randn(1, config.prefix + 4, config.dim)
    guess = drafted(model, prefix, hidden, tokens)
    row = [*lumina_ids(public / LUMINA, "a cat")[0], *image]
    head = lumina_state(public / LUMINA)["lm_head.weight"].double().numpy()
    want = twins.anole_drafter(
        own,
        head,
        config.heads,
        hidden[0, -len(row) + 1 :].double().numpy(),
        row[:-1],  # unshifted, as it was trained
        [True] * (len(row) - 1),
        list(range(len(row) - 1)),
        1e-5,
    )
    mine = guess[0, -len(row) + 1 :].double().numpy()
    np.testing.assert_allclose(mine, want[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("method", mostly_slow(["eagle@chain", "eagle2@dynamic:2x1x4"]))
def test_lumina_drafts_past_the_end_of_a_row(public: Path, method: str) -> None:
    """Greedy tokens are `ar`'s, prompts unequal, row ends forced in drafts and in what is accepted."""
    pipeline = pipeline_of(public / LUMINA)
    requests = [Request(p, 0, Sampling(3.0, 0.0)) for p in PROMPTS[:2]]
    found = []
    for setting in (Setting.parse("ar"), Setting.parse(method)):
        engine = pipeline.engines.make(
            pipeline.spec(requests, pipeline.resolve(setting).tree, 2), "strict"
        )
        known = engine.prefill_batch(pipeline.model.condition.rows(requests, True), requests)
        number = 1
        while min(known[:2]) < 40:
            known, number = engine.run_steps_and_read([0, 0], number, 1), number + 1
        found.append(engine.read_tokens()[:2, :40])
    assert (found[0] == found[1]).all() and (found[0][:, 32] == 8192).all()


@pytest.mark.slow  # a picture of 1,056 tokens each
@pytest.mark.parametrize(
    ("method", "device"),
    [("eagle", "cpu"), ("lantern", "cpu"), ("lantern++", "hpu"), ("eagle2", "hpu")],
)
def test_lumina_draws_by_every_method_with_its_drafter(
    public: Path, tmp_path: Path, method: str, device: str
) -> None:
    tree = "dynamic:2x1x4" if method in ("eagle2", "lantern") else "chain_2"
    how = ["--device", device, *(["--emulate"] if device == "hpu" else ["--graphs", "strict"])]
    draw(public / LUMINA, tmp_path, "--method", f"{method}@{tree}", *how)


def test_drafters_of_other_targets_are_refused(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Anole's, that of a Lumina-mGPT tuned on for another size, norms that no number of heads shares or elsewhere."""
    file = tmp_path / "other" / "model.safetensors"
    shutil.copytree(public / LUMINA / "drafter", file.parent)
    whole = load_file(file)

    def said(drafter: Path, **changed: Tensor) -> str:
        if changed:
            save_file(whole | {n.replace("__", "."): t for n, t in changed.items()}, file)
        options = ("--drafter", drafter, "--output", tmp_path / "x.png")
        args = ["--model", str(public / LUMINA), *map(str, options), "--prompt", "red"]
        assert generate.main([*args, "--method", "eagle"]) == 2
        return capsys.readouterr().err

    other = "is for another target: its embedding"
    assert other in said(public / "anole" / "drafter")
    table = whole["embed_tokens.weight"]
    assert other in said(
        file.parent, embed_tokens__weight=table + 0.02 * torch.randn_like(table) * table.std()
    )
    swin = with_settings(public / ANOLE, tmp_path / "swin", swin_norm=True)
    given = PartOverrides(drafter=str(public / ANOLE / "drafter"))
    with pytest.raises(WeightsError, match="norms behind attention and SwiGLU"):
        open_model(find_parts(str(swin), given))
    about = json.loads((file.parent / "config.json").read_text())
    (file.parent / "config.json").write_text(json.dumps(about | {"hidden_act": "gelu"}))
    assert "hidden_act is gelu, where silu or swish is known" in said(file.parent)
    (file.parent / "config.json").write_text(json.dumps(about))
    norm = {"layers__0__self_attn__k_norm__weight": torch.ones(3, 16)}
    assert "1 of another shape (layers.0.self_attn.k_norm.weight [3, 16] for [2, 16])" in said(
        file.parent, **norm
    )


# ------------------------------------------------------------------------------------ Emu3-Gen


@torch.no_grad()
def test_emu3_draws_sizes_that_are_not_square(public: Path) -> None:
    """Five rows of twelve codes: transformers gives the tokens drawn, from the authors' frame of that size."""
    pipe = LanternPipeline.from_pretrained(str(public / EMU3), device="cpu", dtype="float32")
    result = pipe("red", height=40, width=96, temperature=0, method="jacobi")
    assert result.images[0].size == (96, 40) and result.tokens.shape == (1, 5 * 13)
    tokens = torch.from_numpy(result.tokens[0])
    assert (tokens.view(5, 13)[:, 12] == 32768).all()
    image = torch.where(tokens == 32768, 151846, tokens + 151854)
    model, rows = emu3(public / EMU3), emu3_rows(public / EMU3, "red", "5*12")
    logits = guided_rows(model.model.text_model, model.lm_head, rows, image.tolist(), 3.0)
    assert torch.equal(obeys(logits, 12, 151846, slice(151854, 184622)), image)
    with pytest.raises(OptionError, match="height=41 width=96"):
        pipe("red", height=41, width=96)


def test_lumina_frames_other_sizes(public: Path) -> None:
    model: Any = opened(public / LUMINA)
    sized = model.condition.sized(model.config.target.of_grid((32, 48))).frame
    ids, _ = sized.ids("red"), model.condition.frame.ids("red")
    assert ids[-2:] == [8804 + 16, 8804 + 24] and sized.without(ids) == [8197, *ids[-2:]]
    assert "768x512" in sized.text("red")
    with pytest.raises(OptionError, match="height=496 width=768: allowed: multiples of 32"):
        of_size(model.config, (496, 768), LUMINA)


def test_emu3s_own_tokenizer_is_read_by_the_names_of_its_class(public: Path) -> None:
    """Emu3VisionVQModel saves `decoder.mid`, `attn.0.norm` and 1 x 1 convolutions; transformers' names are others."""
    folder = public / AUTHORS_EMU3
    with safe_open(folder / "vqvae" / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        weight = file.get_tensor("decoder.mid.attn_1.q.weight")
    for name in ("decoder.mid.attn_1.q.weight", "decoder.up.3.attn.1.proj_out.weight"):
        assert shapes[name] == [64, 64, 1, 1]
    for name in ("encoder.mid.attn_1.norm.weight", "decoder.up.3.attn.0.norm.conv_y.weight"):
        assert name in shapes
    vq = opened(folder).vq
    assert vq is not None and torch.equal(
        vq.state_dict()["decoder.middle_block.attn_1.q_proj.weight"], weight[:, :, 0, 0]
    )


# ------------------------------------------------------------------------------------ all of them


READERS = (
    ANOLE,
    LUMINA,
    "lumina-mgpt-2.0",
    HUB_JANUS,
    EMU3,
    "simplear",
    "mammothmoda2",
    "glm-image",
)


@pytest.fixture(params=READERS)
def reader(public: Path, request: pytest.FixtureRequest) -> tuple[TokenConditioner, Tokenizer]:
    """What reads the prompts of each family, without its weights, and its tokenizer's file as it is."""
    if not (public / request.param).is_dir():
        pytest.skip("the installed transformers lacks it")
    found = open_model(find_parts(str(public / request.param), optional=("pixels",)))
    folder = found.parts.text or public / request.param
    with shapes_only():
        target = Target(found.config.target)
    condition = make_condition(found.config.condition, target, folder, Placement())
    assert isinstance(condition, TokenConditioner)
    return condition, Tokenizer.from_file(str(folder / "tokenizer.json"))


SUBJECTS = (
    "dog",
    "a red apple",
    "the photo of 12 blue trees",
    'a sign that reads "house on sky", in neon',
    "‘Œuvre’ – an “old” café in Zürich…",
    "一只狗 and 🐶👩‍👩‍👧",
)
PLACES = (
    "{}",
    "{} (4k, f/1.8) [detail] {{blue}}",
    "picture of {}; it isn't $5.99 & 100%",
    "{}\n\nof the sky,\tgreen",
    "  two  blanks:  {} ",
    "{} <b>bold</b> https://example.com/a_b?c=1#2",
    "A{}B: 3x7=21, #1 @home ~ ^_^ \\ | / *",
    "photo:{}​﻿ é ½ x²",
)
STYLES = ("", ", oil on canvas.", " -- 1920s", "!!", " (photo)")
CAPTIONS = [place.format(it) + style for it in SUBJECTS for place in PLACES for style in STYLES]


def test_a_prompt_is_split_as_its_tokenizer_does(
    reader: tuple[TokenConditioner, Tokenizer],
) -> None:
    """Of 240 captions: nothing but control tokens' names and image codes is broken up."""
    condition, own = reader
    frame = condition.frame
    for caption in CAPTIONS:
        words = own.encode(frame.text(caption), add_special_tokens=False).ids
        assert len(words) <= frame.room
        ids = frame.ids(condition.plain(caption))
        assert ids == [*frame.before, *words, *frame.after]
        assert condition.words(caption) == own.encode(caption, add_special_tokens=False).ids


def test_names_of_control_tokens_and_image_codes_in_a_prompt_are_text(
    reader: tuple[TokenConditioner, Tokenizer],
) -> None:
    """Words that a tokenizer was given later, and that it does not call special, are none of them."""
    condition, _ = reader
    spelled = [added.content for added in condition.tokenizer.added_tokens_decoder.values()]
    for prompt in (" ".join(spelled[:5] + spelled[-5:]), spelled[-1] * 2):
        assert condition.control & set(condition.frame.words(prompt))
        assert not condition.control & set(condition.words(prompt))
        assert condition.length(Request(prompt)) > condition.length(Request("red"))
    condition.tokenizer.add_tokens(["apple"])
    later = TokenConditioner(condition.tokenizer, condition.frame, condition.embed)
    assert later.plain("a red apple") == "a red apple"


FRAMED = [name for name in THEIRS if name != SWIN]


@pytest.mark.parametrize("name", FRAMED)
def test_a_prompt_is_framed_token_for_token(public: Path, name: str) -> None:
    condition = opened(public / name).condition
    assert isinstance(condition, TokenConditioner)
    theirs = THEIRS[name](public / name)
    for prompt in (*PROMPTS, "two lines\nof words", "  spaces at both ends ", ""):
        ids, without = theirs.rows(prompt)
        assert condition.frame.ids(prompt) == ids and condition.frame.without(ids) == without
    assert condition.takes_negative == (name in (EMU3, SIMPLEAR))


def test_a_negative_prompt_takes_the_place_of_the_authors(public: Path) -> None:
    frames = {name: opened(public / name).condition.frame for name in (EMU3, SIMPLEAR)}  # type: ignore[attr-defined]
    assert frames[EMU3].without([], "red") == emu3_ids(public / EMU3, "red")
    assert frames[SIMPLEAR].without([], "dog") == simplear_rows(public / SIMPLEAR, "", "dog")[1]


@torch.no_grad()
@pytest.mark.parametrize("name", mostly_slow(FRAMED, ANOLE, EMU3, SIMPLEAR, HUB_JANUS))
def test_logits_are_those_of_transformers(public: Path, name: str) -> None:
    """Of a row of random codes, what closes it, and the next ones, for prompts of unequal lengths."""
    model, theirs = opened(public / name), THEIRS[name](public / name)
    config = model.target.config
    shape = len(PROMPTS), config.columns + 8
    tokens = torch.randint(config.codes, shape, generator=torch.Generator().manual_seed(5))
    if config.row_ends:
        tokens[:, config.columns - 1] = config.codes
    for prompt, row in zip(PROMPTS, tokens, strict=True):
        mine = guided_logits(model, [prompt], row[None], 4.0)[0]
        image = theirs.numbered(row).tolist()
        want = guided_rows(theirs.run, theirs.head, theirs.rows(prompt), image, 4.0)
        allowed = want[:, theirs.codes]
        if theirs.end is not None:
            allowed = torch.cat([allowed, want[:, theirs.end, None]], 1)
        assert allowed.std() > 0.1
        torch.testing.assert_close(mine, allowed, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("names", [(JANUS, HUB_JANUS), (EMU3, AUTHORS_EMU3)])
def test_both_layouts_hold_the_same_model(tmp_path: Path, names: tuple[str, str]) -> None:
    """The authors' file and transformers' of one seed load into equal tensors."""
    from tests.checkpoints.synthetic import WRITERS

    for name in names:
        WRITERS[name](tmp_path / name, torch.Generator().manual_seed(3))
    one, other = (opened(tmp_path / name) for name in names)
    same_model(one, other)
    assert one.sampling == other.sampling


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    mostly_slow([ANOLE, SWIN, LUMINA, EMU3, EMU35_IMAGE, HUB_JANUS], HUB_JANUS),
)
def test_greedy_pictures_are_those_of_transformers(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Words in, tokens out, of prompts of unequal lengths in one batch, by the native decoder and by the plain one."""
    monkeypatch.setitem(CHAMELEON.sizes, "grid", (8, 8))
    small_pictures(monkeypatch, (8, 8))
    folder = public / (ANOLE if name == SWIN else name)
    if name == SWIN:
        folder = with_settings(folder, tmp_path / "swin", swin_norm=True)
    mine, theirs = greedy(folder, PROMPTS, 3.0), THEIRS[name](folder)
    assert torch.equal(mine, greedy(folder, PROMPTS, 3.0, layout="plain"))
    if name == EMU35_IMAGE:
        assert torch.equal(mine, greedy(folder, PROMPTS, 3.0, "scd@4"))
    config = opened(folder).config.target
    columns = config.grid[1]
    assert config.parameters == sum(p.numel() for p in opened(folder).target.parameters())
    for prompt, row in zip(PROMPTS, mine, strict=True):
        image = theirs.numbered(row)
        logits = guided_rows(theirs.run, theirs.head, theirs.rows(prompt), image.tolist(), 3.0)
        assert torch.equal(obeys(logits, columns, theirs.end, theirs.codes), image)
        assert len(image.unique()) > 4


def draw(folder: Path, tmp_path: Path, *options: str) -> Any:
    """Draw by command; its tokens [1, N], of which those that close rows stand where they must."""
    file = tmp_path / "tokens.npz"
    output = ["--output", str(tmp_path / "x.png"), "--save-tokens", str(file)]
    command = ["generate", "--model", str(folder), "--prompt", "red", *output, *options]
    assert cli.main(command) == 0
    config, drawn = open_model(find_parts(str(folder))).config.target, np.load(file)["tokens"]
    if config.row_ends:
        at_end = np.arange(1, config.tokens + 1) % config.columns == 0
        assert np.array_equal(drawn[0] == config.codes, at_end)
    assert Image.open(tmp_path / "x.png").size == (SIDES[folder.name],) * 2
    return drawn


def refused(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """What `generate` says when it refuses."""
    assert generate.main([*map(str, args), "--prompt", "red", "--method", "ar"]) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_a_negative_prompt_of_ones_own(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes the picture, and is kept in it."""
    monkeypatch.chdir(tmp_path)
    own = ["--negative-prompt", "a dog", "--output", "own.png"]
    usual = ["--prompt", "red", "--method", "ar", "--model", str(public / EMU3)]
    assert generate.main([*usual, *own]) == generate.main([*usual, "--output", "usual.png"]) == 0
    assert generate.main(["--from-png", "own.png", "--output", "again.png"]) == 0
    pixels = {n: Image.open(f"{n}.png").tobytes() for n in ("own", "usual", "again")}
    assert pixels["own"] == pixels["again"] != pixels["usual"]


def test_relatives_of_other_tensors_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JanusFlow, two Qwen, a Qwen3 of Chameleon's vocabulary, and one that is called Lumina-mGPT."""
    norm = "model.layers.0.self_attn.q_norm.weight"

    def table(rows: int, *heads: int) -> dict[str, Tensor]:
        return {"model.embed_tokens.weight": torch.zeros(rows, 2), norm: torch.ones(*heads, 2)}

    relatives = {
        "flow": ({"vision_gen_dec_model.x.weight": torch.zeros(2)}, ""),
        "Lumina-mGPT-7B-768": (table(151936, 1), ", as Qwen2.5 or Qwen3 does"),
        "qwen2.5": (table(152064), ", as Qwen2.5 does"),
        "qwen": (table(65536), ""),
    }
    for name, (tensors, like) in relatives.items():
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "relative"}')
        said = refused(capsys, "--model", folder, "--output", tmp_path / "x.png")
        assert "is of an unknown model family: it holds" in said and "known are lumina" in said
        assert min(tensors) + (f", {norm}" if norm in tensors else "") + like in said
        assert "; config.json says relative;" in said


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "scd@2", "sjd-pac@2:2x1"])
def test_emu35_draws_from_its_own_distribution(
    public: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """By chi-square over first tokens of many seeds, with its published guidance and top-k."""
    small_pictures(monkeypatch, (2, 4))
    folder = public / EMU35_IMAGE
    pipeline, plain = pipeline_of(folder), pipeline_of(folder, layout="plain")
    found = measure(pipeline, plain, pipeline.resolve(Setting.parse(method)), "red", 64)
    assert found.chance > 1e-4 and (found.metered or 0.0) == 0.0


@pytest.mark.slow
def test_emu35_draws_a_picture_of_its_published_size(public: Path, tmp_path: Path) -> None:
    """64 x 64 codes in rows that are closed, 1024 x 1024 pixels; nothing is captured behind the warm-up."""
    output = ["--output", str(tmp_path / "x.png"), "--save-tokens", str(tmp_path / "x.npz")]
    model = ["--model", str(public / EMU35_IMAGE), "--graphs", "strict", "--method", "ar"]
    assert generate.main([*model, "--prompt", "red", *output]) == 0
    tokens = np.load(tmp_path / "x.npz")["tokens"].reshape(64, 65)
    assert (tokens[:, 64] == 131072).all() and (tokens[:, :64] < 131072).all()
    assert Image.open(tmp_path / "x.png").size == (1024, 1024)


DRAFTED = [JANUS, EMU3, EMU35_IMAGE, MAMMOTH, "glm-image"]


@pytest.mark.parametrize("name", mostly_slow(DRAFTED, JANUS))
def test_a_drafter_learns_and_drafts(
    public: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One step of training has a gradient, and drafts of what came out of it leave greedy pictures as they are."""
    if not (public / name).is_dir():
        pytest.skip("the installed transformers lacks it")
    small_pictures(monkeypatch, (4, 6))
    for family, key, value in (
        (MAMMOTHMODA2, "grid", (3, 4)),
        (GLM_IMAGE, "grid", (2, 3)),  # a few codes behind the preview
        (GLM_IMAGE, "prefix", 64),
        (GLM_IMAGE, "prefixes", ()),
    ):
        monkeypatch.setitem(family.sizes, key, value)
    parts = find_parts(str(public / name), optional=("pixels",))
    model = open_model(parts).load(Placement())
    config = model.target.config
    drafter = like_the_target(model.target, DrafterConfig())
    tokens = torch.randint(config.codes, (1, config.tokens))
    if config.row_ends:
        tokens[:, config.columns - 1 :: config.columns] = config.codes
    loss, overlap = Unrolled(drafter.train(), model.target, 2)(Lesson(model, ["red"], tokens))
    loss.backward()
    gradient = drafter.fc.weight.grad
    assert bool(loss.isfinite()) and gradient is not None and bool(gradient.abs().sum() > 0)
    assert bool((overlap >= 0).all() and (overlap <= 1).all())
    model.drafter = drafter.requires_grad_(False).eval()
    model.config = replace(model.config, drafter=DrafterConfig())
    pipeline = LanternPipeline(model, DevicePlan(get_backend("cpu"), model.target.dtype))
    requests = [Request(p, 0, Sampling(3.0, 0.0)) for p in PROMPTS[:2]]
    drawn = [
        pipeline.draw(requests, pipeline.resolve(method)).tokens
        for method in ("ar", "eagle@chain", "eagle2@dynamic:2x1x4")
    ]
    assert (drawn[0] == drawn[1]).all() and (drawn[0] == drawn[2]).all()


def shrunk(folder: Path, goal: Path) -> Path:
    """A model as `models convert` writes it, for pictures of 4 x 8 codes."""
    assert convert.main([str(folder), str(goal)]) == 0
    about = json.loads((goal / "model.json").read_text())
    about["target"] |= {"grid": [4, 8], "grids": []}
    (goal / "model.json").write_text(json.dumps(about))
    return goal


@pytest.mark.slow
@pytest.mark.parametrize("name", [LUMINA, "lumina-mgpt-2.0", "simplear", EMU35_IMAGE])
def test_every_command_takes_it(public: Path, tmp_path: Path, name: str) -> None:
    """Plan, strict lint with a window, bench, a server, and a drafter that was trained for it."""
    ours, prompts = str(shrunk(public / name, tmp_path / "ours")), tmp_path / "prompts.txt"
    prompts.write_text("".join(f"{number} apples\n" for number in range(10)))
    methods = ["--method", "ar,scd@4"]
    assert cli.main(["models", "plan", ours, "--memory", "24GB"]) == 0
    assert cli.main(["lint", "--model", ours, "--strict", "--method", "scd@4"]) == 0
    small = ["--batch-sizes", "1", "--num-images", "1", "--output", str(tmp_path / "bench.json")]
    assert cli.main(["bench", "--model", ours, "--graphs", "strict", *methods, *small]) == 0
    command = [sys.executable, "-m", "lantern_hpu", "serve", "--model", ours, *methods]
    with serving(command, tmp_path / "log") as (url, _):
        body = json.dumps({"prompt": "red", "n": 2, "response_format": "b64_json"}).encode()
        header = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/images/generations", body, header)
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert len(json.load(answer)["data"]) == 2
    if name in ("simplear", EMU35_IMAGE):
        return  # the table of neighbours of 64,000 codes, which training measures by, takes minutes
    few = "--samples 10 --steps 1 --batch 1 --measured 1 --measure-every 1 --unroll 1".split()
    drafter = ["--output", str(tmp_path / "drafter"), "--data", str(prompts)]
    assert cli.main(["train", "drafter", "--model", ours, *drafter, *few]) == 0
    given = ["--drafter", str(tmp_path / "drafter"), "--output", str(tmp_path / "x.png")]
    drawn = ["--prompt", "red", "--method", "eagle@chain", *given]
    assert cli.main(["generate", "--model", ours, *drawn]) == 0
