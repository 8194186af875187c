"""Public checkpoints: every published format loads whole or not at all, computes what its authors' code computes, and
draws.

The files are written by `tests/checkpoints/synthetic.py` from the formats' descriptions, the right answers come
from `tests/numpy_twins.py`; neither knows the loader.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lantern_hpu.commands import convert, generate
from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode.engine import Engine
from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.methods.setting import Setting
from lantern_hpu.models import model as codebook
from lantern_hpu.models.families import family_of
from lantern_hpu.models.families.base import LLAMA, Files, check_keys
from lantern_hpu.models.files import load
from lantern_hpu.models.files.checkpoint import open_checkpoint
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.files.names import PartOverrides, settings_beside
from lantern_hpu.models.files.tokenizers import open_vq
from lantern_hpu.models.model import ImageModel, Placement
from lantern_hpu.models.text.frames import FIRST_IMAGE_TOKEN, code_name
from lantern_hpu.models.text.prefix import CaptionConditioner, TokenConditioner
from lantern_hpu.models.vq import VQModel
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.prompts import usual_prompts
from lantern_hpu.zoo.find import find_parts
from lantern_lab.train.unroll import Lesson
from tests import numpy_twins as twins
from tests.marks import mostly_slow
from tests.published import drafted, one_pass

CODES = [3, 0, 9, 31, 60, 7, 7, 12, 1, 5]
ROWS = torch.tensor([CODES, CODES])  # with a condition, and without
TEXT, HUB_TEXT, ANOLE, CLASS = "llamagen-t2i-256", "llamagen-t2i-512", "anole", "llamagen-c2i"
# What to pass to --model below the folder of synthetic checkpoints, and the condition
FORMATS = {
    "pt, key model": (f"{CLASS}/c2i_B_256.pt", "207"),
    "pt, raw, wide heads": ("llamagen-c2i-384-fsdp/c2i_3B_384.pt", "cock"),
    "pt, raw": ("llamagen-c2i-384-fsdp/c2i_XXL_384.pt", "golden retriever"),
    "pt, key module or state_dict": ("llamagen-c2i-containers/c2i_B_384.pt", "1"),
    "pt with captions": (TEXT, "red"),
    "Hugging Face folder with captions": (HUB_TEXT, "red"),
    "Chameleon, vqgan.ckpt": (ANOLE, "a cat"),
    "Chameleon, decoder inside": ("anole-hub", "a cat"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_HPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def given(public: Path, model: str) -> PartOverrides:
    vq = public / CLASS / "vq_ds16_c2i.pt"
    return PartOverrides(vq=str(vq)) if "containers" in model else PartOverrides()


def opened(public: Path, model: str, **parts: Any) -> ImageModel:
    own: dict[str, Any] = {n: str(v) if isinstance(v, Path) else v for n, v in parts.items()}
    chosen = PartOverrides(**own) if parts else None
    return open_model(find_parts(str(public / model), chosen or given(public, model))).load(
        Placement()
    )


def copy(public: Path, name: str, goal: Path) -> Path:
    return Path(shutil.copytree(public / name, goal / name))


# ------------------------------------------------------------------------------------ the same numbers


def raw(file: Path) -> dict[str, twins.Array]:
    """A checkpoint's tensors as the twins take them."""
    content = open_checkpoint(file)
    return twins.arrays({name: content.read(name) for name in content.shapes})


def near(mine: torch.Tensor, want: twins.Array) -> None:
    np.testing.assert_allclose(mine.double().numpy(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", ["pt, key model", "pt, raw, wide heads"])
def test_class_conditional_target_equals_its_twin(public: Path, model: str) -> None:
    file, _ = FORMATS[model]
    mine = opened(public, file)
    weights, config = twins.from_gpt(raw(public / file)), mine.target.config
    with torch.no_grad():
        hidden = one_pass(mine, mine.condition.rows([Request("207")], guidance=True), ROWS)
    for row, label in enumerate((207, None)):
        want = twins.llamagen_target(
            weights,
            config.heads,
            config.grid,
            twins.class_prefix(weights, label),
            [True],
            CODES,
            config.norm_eps,
        )
        near(hidden[row], want[1])
        with torch.no_grad():
            near(mine.target.head(hidden[row]), want[0])


@pytest.mark.parametrize("name", [TEXT, HUB_TEXT])
def test_caption_target_and_drafter_equal_their_twins(public: Path, name: str) -> None:
    """Rotary grid, condition slots with q = k = 0, pads, the drafter's 119 entries and its missing norms."""
    mine = opened(public, name)
    config, drafter = mine.target.config, mine.drafter
    assert drafter is not None
    with torch.no_grad():
        prefix = mine.condition.rows([Request("red apple on a table")], guidance=True)
        hidden = one_pass(mine, prefix, ROWS)
        guessed = drafted(mine, prefix, hidden[:, :-1], ROWS)
    parts = find_parts(str(public / name))
    assert parts.target is not None and parts.drafter is not None
    stored = raw(parts.target)
    weights = stored if "lm_head.weight" in stored else twins.from_gpt(stored)
    own = {n.removeprefix("module."): w for n, w in raw(parts.drafter).items()}
    assert isinstance(mine.condition, CaptionConditioner)
    features = mine.condition.text.encode(["red apple on a table"])
    valid = features.valid[0].tolist()
    assert 0 < sum(valid) < len(valid)
    for row, caption in enumerate((features.features[0].double().numpy(), None)):
        want = twins.llamagen_target(
            weights,
            config.heads,
            config.grid,
            twins.text_prefix(weights, caption),
            valid,
            CODES,
            config.norm_eps,
            earlier=True,
        )
        near(hidden[row], want[1])
        want_guesses = twins.llamagen_drafter(
            own,
            weights["lm_head.weight"],
            config.heads,
            config.grid,
            config.prefix,
            want[1][:-1],
            CODES,
            drafter.config.norm_eps,
        )
        near(guessed[row], want_guesses[0])


def test_anole_and_its_drafter_equal_their_twins(public: Path) -> None:
    """Positions that count no pads, query-key norms, the sliced head, words in the drafter's prefill."""
    mine = opened(public, ANOLE)
    config, drafter = mine.target.config, mine.drafter
    assert drafter is not None and isinstance(mine.condition, TokenConditioner)
    words = mine.condition.words("a cat")
    with torch.no_grad():
        prefix = mine.condition.rows([Request("a cat")], guidance=True)
        hidden = one_pass(mine, prefix, ROWS)
        logits = mine.target.head(hidden)
        guessed = drafted(mine, prefix, hidden[:, :-1], ROWS)
    weights, own = raw(public / ANOLE), raw(public / ANOLE / "drafter")
    image = [code + FIRST_IMAGE_TOKEN for code in CODES]
    for row, guided in enumerate((True, False)):
        ids, valid, positions = twins.anole_row(words, guided, image)
        want_logits, want = twins.chameleon_target(weights, config.heads, ids, valid, positions)
        real = sum(valid)
        near(hidden[row, -real:], want[-real:])
        near(logits[row, -real:], want_logits[-real:, 4 : 4 + config.vocab_size])
        want_guesses = twins.anole_drafter(
            own,
            weights["lm_head.weight"],
            config.heads,
            want[:-1],
            ids[1:],
            valid[:-1],
            positions[:-1],
            drafter.config.norm_eps,
        )
        near(guessed[row, -real + 1 :], want_guesses[0][-real + 1 :])


@pytest.mark.parametrize(
    ("file", "twin"),
    [
        (f"{CLASS}/vq_ds16_c2i.pt", twins.llamagen_image),
        ("llamagen-vq8/vq_ds8_c2i.pt", twins.llamagen_image),
        ("anole/vqgan.ckpt", twins.anole_image),
        ("anole/vqvae", twins.anole_image),
        ("emu3.5-image/Emu3.5-VisionTokenizer", twins.anole_image),
    ],
)
def test_tokenizers_decode_as_their_twins(public: Path, file: str, twin: Any) -> None:
    config, stored = open_vq(open_checkpoint(public / file), twin is twins.llamagen_image)
    vq = VQModel(config)
    stored.fill(vq, torch.float32, None)
    codes = torch.arange(16)[None]
    with torch.no_grad():
        image = vq.decode_latents(vq.quantize.look_up(codes.view(1, 4, 4)))[0]
    weights = {n.removeprefix("model."): w for n, w in raw(public / file).items()}
    near(image, twin(weights, codes[0].tolist()))


@pytest.mark.parametrize("name", mostly_slow([TEXT, ANOLE], TEXT))
def test_training_sees_what_decoding_sees(public: Path, name: str) -> None:
    mine = opened(public, name)
    tokens = torch.arange(mine.target.config.tokens)[None] % mine.target.config.vocab_size
    assert mine.drafter is not None
    with torch.no_grad():
        lesson = Lesson(mine, ["a cat"], tokens)
        prefix = mine.condition.rows([Request("a cat")], True)
        hidden = one_pass(mine, prefix, tokens[:, :-1].expand(2, -1))
        guessed = mine.drafter(
            lesson.tokens, lesson.features, lesson.rope, lesson.mask(mine.drafter, 0)
        )
        want = drafted(mine, prefix, hidden[:, :-1], tokens.expand(2, -1))
    torch.testing.assert_close(lesson.hidden, hidden)
    torch.testing.assert_close(guessed, want)


# ------------------------------------------------------------------------------------ drawing


def first_tokens(pipeline: LanternPipeline, method: str, count: int) -> list[int]:
    """Greedy tokens of one image, as far as `count`."""
    request = Request("red", 0, Sampling(3.0, 0.0))
    tree = pipeline.resolve(Setting.parse(method if method == "ar" else f"{method}@chain")).tree
    engine: Engine = pipeline.engines.make(pipeline.spec([request], tree, 1), "eager")
    known = engine.prefill_batch(pipeline.model.condition.rows([request], True), [request])
    number = 1
    while known[0] < count:
        known, number = engine.run_steps_and_read([0], number, 1), number + 1
    return [int(t) for t in engine.read_tokens()[0, :count]]


@pytest.mark.parametrize("name", mostly_slow([TEXT, HUB_TEXT, ANOLE], ANOLE))
def test_greedy_speculation_gives_the_tokens_of_plain_decoding(public: Path, name: str) -> None:
    with torch.no_grad():
        pipeline = LanternPipeline.from_pretrained(
            str(public / name), device="cpu", dtype="float32"
        )
        assert first_tokens(pipeline, "eagle", 40) == first_tokens(pipeline, "ar", 40)


def test_an_unshifted_drafter_is_taken_at_its_word(public: Path, tmp_path: Path) -> None:
    folder = copy(public, ANOLE, tmp_path)
    about = folder / "drafter" / "config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"drafter_shift": 0}))
    with torch.no_grad():
        pipeline = LanternPipeline.from_pretrained(str(folder), device="cpu", dtype="float32")
        assert pipeline.model.drafter is not None and pipeline.model.drafter.shift == 0
        assert first_tokens(pipeline, "eagle", 20) == first_tokens(pipeline, "ar", 20)


# ------------------------------------------------------------------------------------ conversion


def test_a_full_disk_leaves_nothing(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, file: Path) -> None:
        Path(file).write_bytes(b"half")
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr("lantern_hpu.models.files.load.save_file", full)
    (tmp_path / "ours.part").mkdir()  # the user's own
    model, _ = FORMATS["pt, key model"]
    assert convert.main([str(public / model), str(tmp_path / "ours")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["ours.part"]


def test_converted_files_can_be_read_by_others(public: Path, tmp_path: Path) -> None:
    model, _ = FORMATS["pt, key model"]
    assert convert.main([str(public / model), str(tmp_path / "ours")]) == 0
    plain = tmp_path / "plain"
    plain.touch()
    modes = {file.stat().st_mode for file in (tmp_path / "ours").iterdir()}
    assert modes == {plain.stat().st_mode}


def test_published_containers_of_the_same_weights_have_one_fingerprint(
    public: Path, tmp_path: Path
) -> None:
    """A drafter trained for one belongs to the other."""
    whole = opened(public, TEXT)
    state = twins.from_gpt(raw(public / TEXT / "t2i_XL_stage1_256.pt"))
    folder = copy(public, TEXT, tmp_path)
    (folder / "t2i_XL_stage1_256.pt").unlink()
    tensors = {n: torch.from_numpy(t).bfloat16().contiguous() for n, t in state.items()}
    save_file(tensors, folder / "model.safetensors")
    config = whole.target.config
    about = {"num_attention_heads": config.heads, "block_size": config.tokens}
    (folder / "config.json").write_text(json.dumps(about))
    assert opened(tmp_path, TEXT).fingerprint == whole.fingerprint


# ------------------------------------------------------------------------------------ strictness


State = dict[str, torch.Tensor]


def changed(public: Path, goal: Path, name: str, change: Callable[[State], State]) -> None:
    """A copy of a checkpoint of shards with the tensors of each changed."""
    folder, places = copy(public, name, goal), dict[str, str]()
    for file in folder.glob("model-*.safetensors"):
        tensors = change(load_file(file))
        save_file(tensors, file)
        places |= dict.fromkeys(tensors, file.name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))


def test_every_wrong_tensor_is_listed(public: Path, tmp_path: Path) -> None:
    def spoil(tensors: State) -> State:
        found = without("layers.0.mlp.down_proj", tensors)
        if "model.norm.weight" in found:
            found["model.norm.weight"] = torch.ones(3)
            found["model.bonus.weight"] = torch.ones(3)
        return found

    changed(public, tmp_path, HUB_TEXT, spoil)
    with pytest.raises(WeightsError) as caught:
        opened(tmp_path, HUB_TEXT)
    for word in ("layers.0.mlp.down_proj.weight", "norm.weight [3]", "bonus.weight"):
        assert word in str(caught.value)


def without(part: str, tensors: State) -> State:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


@pytest.mark.parametrize("name", [HUB_TEXT, ANOLE])
def test_missing_last_layers_are_missed(public: Path, tmp_path: Path, name: str) -> None:
    last = json.loads((public / name / "config.json").read_text())["num_hidden_layers"] - 1
    kept = partial(without, f".layers.{last}.")
    changed(public, tmp_path, name, kept)
    with pytest.raises(WeightsError, match=f"layers.{last}.*missing|missing.*layers.{last}"):
        opened(tmp_path, name)


def test_tensors_are_read_one_at_a_time(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host holds the tensors of one recipe at most, whatever the size of the checkpoint."""
    parts = replace(find_parts(str(public / HUB_TEXT)), drafter=None)
    checkpoint = open_checkpoint(parts.target)
    alive: dict[int, int] = {}
    most = 0

    def watched(name: str) -> torch.Tensor:
        nonlocal most
        tensor = checkpoint.read(name).clone()
        alive[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, alive.pop, id(tensor))
        most = max(most, sum(alive.values()))
        return tensor

    monkeypatch.setattr(
        "lantern_hpu.models.files.load.open_checkpoint",
        lambda path: (
            replace(checkpoint, read=watched) if path == parts.target else open_checkpoint(path)
        ),
    )
    open_model(parts).load(Placement(torch.bfloat16, torch.device("meta")))
    config = json.loads((public / HUB_TEXT / "config.json").read_text())
    largest = 2 * config["intermediate_size"] * config["hidden_size"] * 4  # gate and up
    shard = max(f.stat().st_size for f in parts.target.glob("model-*.safetensors"))
    assert 0 < most <= 1.2 * max(largest, config["vocab_size"] * config["hidden_size"] * 4) < shard


# ------------------------------------------------------------------------------------ mixed-up parts


def test_a_drafter_with_an_unknown_embedding_is_refused(public: Path, tmp_path: Path) -> None:
    folder = copy(public, HUB_TEXT, tmp_path)
    file = folder / "drafter" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "embed_tokens.weight": tensors["embed_tokens.weight"].flip(0)}, file)
    with pytest.raises(WeightsError, match="neither the target's embedding nor the target's head"):
        opened(tmp_path, HUB_TEXT)


def test_of_two_tokenizers_the_one_of_the_targets_kind_is_taken(
    public: Path, tmp_path: Path
) -> None:
    folder = copy(public, TEXT, tmp_path)
    shutil.copy(public / CLASS / "vq_ds16_c2i.pt", folder)
    assert find_parts(str(folder)).vq == folder / "vq_ds16_t2i.pt"
    (folder / "vq_ds16_t2i.pt").rename(folder / "vq_other.pt")
    (folder / "vq_ds16_c2i.pt").rename(folder / "vq_mine.pt")
    with pytest.raises(WeightsError, match=r"(?s)vq_mine.pt, vq_other.pt.*vq"):
        find_parts(str(folder))


def test_another_tokenizer_for_a_folder_of_ours_is_checked(public: Path, tmp_path: Path) -> None:
    assert convert.main([str(public / TEXT), str(tmp_path / "ours")]) == 0
    with pytest.raises(WeightsError, match="8192 codes"):
        opened(tmp_path, "ours", vq=public / ANOLE / "vqgan.ckpt")
    with pytest.raises(OptionError, match="256 x 256"):
        opened(tmp_path, "ours", image_size=512)
    before = opened(tmp_path, "ours").files
    other = PartOverrides(vq=str(public / CLASS / "vq_ds16_c2i.pt"))
    changed = open_model(find_parts(str(tmp_path / "ours"), other)).load(Placement()).files
    assert {n for n in before if before[n] != changed[n]} == {"vq.safetensors"}
    assert "text" in before


@pytest.mark.slow
def test_an_image_is_drawn_again_with_the_parts_it_was_drawn_with(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(public)
    first, again = tmp_path / "a.png", tmp_path / "b.png"
    options = ["--model", f"{CLASS}/c2i_B_256.pt", "--vq", f"{CLASS}/vq_ds16_c2i.pt"]
    assert generate.main([*options, "--prompt", "hen", "--output", str(first)]) == 0
    monkeypatch.chdir(tmp_path)
    assert generate.main(["--from-png", str(first), "--output", str(again)]) == 0
    assert np.array_equal(np.asarray(Image.open(first)), np.asarray(Image.open(again)))


def test_neighbours_are_the_nearest_codes_and_are_kept(tmp_path: Path) -> None:
    book = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    distances = np.linalg.norm(book[:, None].double() - book.double(), axis=-1)
    np.fill_diagonal(distances, np.inf)
    want = torch.from_numpy(distances.argsort(1, kind="stable")[:, :7]).int()
    assert torch.equal(codebook.nearest_codes(book, 7), want)
    assert torch.equal(codebook.cached_nearest(book, 7), want)
    (file,) = (tmp_path / "cache" / "neighbours").iterdir()
    assert torch.equal(codebook.cached_nearest(book, 7), want)
    other = codebook.cached_nearest(book + 1e-3 * torch.arange(50)[:, None], 7)
    assert other.shape == want.shape and len(list(file.parent.iterdir())) == 2


def test_image_tokens_must_lie_where_their_names_say(public: Path, tmp_path: Path) -> None:
    folder = copy(public, ANOLE, tmp_path)
    file = folder / "tokenizer.json"
    text = file.read_text()
    a, b = code_name(5), code_name(6)
    swapped = text.replace(f'"{a}"', '"%%"').replace(f'"{b}"', f'"{a}"').replace('"%%"', f'"{b}"')
    file.write_text(swapped)
    with pytest.raises(WeightsError, match="IMGIMGFZ is token 10, expected token 9"):
        opened(tmp_path, ANOLE)


# ------------------------------------------------------------------------------------ bad files


def test_all_missing_parts_are_listed_at_once(public: Path, tmp_path: Path) -> None:
    file = public / TEXT / "t2i_XL_stage1_256.pt"
    shutil.copy(file, tmp_path / file.name)
    with pytest.raises(WeightsError) as caught:
        opened(tmp_path, file.name)
    for word in ("by vq;", "vq_ds16", "by text_encoder;", "google/flan-t5-xl"):
        assert word in str(caught.value)


def test_a_cut_off_file_is_one_clear_error(public: Path, tmp_path: Path) -> None:
    folder = copy(public, HUB_TEXT, tmp_path)
    shard = next(folder.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="damaged or cut off"):
        opened(tmp_path, HUB_TEXT)
    half = tmp_path / "c2i_B_256.pt"
    half.write_bytes((public / CLASS / half.name).read_bytes()[:5000])
    with pytest.raises(WeightsError, match="damaged"):
        opened(tmp_path, half.name, vq=public / CLASS / "vq_ds16_c2i.pt")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["BOMB"],)


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    torch.save({"model": {"x": torch.ones(2)}, "args": Bomb()}, tmp_path / "c2i_B_256.pt")
    with pytest.raises(WeightsError, match="run code"):
        opened(tmp_path, "c2i_B_256.pt")
    assert not (tmp_path / "exploded").exists()
    with open(tmp_path / "plain.pt", "wb") as file:
        pickle.dump(Bomb(), file)
    with pytest.raises(WeightsError):
        opened(tmp_path, "plain.pt")
    assert not (tmp_path / "exploded").exists()


def test_labels_of_ones_own_classes_are_numbers(public: Path, tmp_path: Path) -> None:
    """A LlamaGen that was tuned on ten classes, and the row of no class."""
    content = torch.load(public / CLASS / "c2i_B_256.pt", weights_only=False)
    name = "cls_embedding.embedding_table.weight"
    table = content["model"][name][:11].clone()
    torch.save({"model": content["model"] | {name: table}}, tmp_path / "own_256.pt")
    condition = opened(tmp_path, "own_256.pt", vq=public / CLASS / "vq_ds16_c2i.pt").condition
    rows = condition.rows([Request("3"), Request(" 9")], guidance=True).embeddings
    torch.testing.assert_close(rows[:, 0].to(table), table[[3, 9, 10, 10]])
    assert usual_prompts(condition.classes) == list("01234567")
    for label in ("10", "-1", "daisy"):
        with pytest.raises(OptionError, match="an index from 0 to 9"):
            condition.prepare([Request(label)])


def test_unknown_size_and_family_say_what_to_do(public: Path, tmp_path: Path) -> None:
    shutil.copy(public / CLASS / "c2i_B_256.pt", tmp_path / "mine.pt")
    content = torch.load(public / CLASS / "vq_ds16_c2i.pt", weights_only=True)
    vq = public / CLASS / "vq_ds16_c2i.pt"
    stored = open_checkpoint(tmp_path / "mine.pt")
    state = {name: stored.read(name).clone() for name in stored.shapes if "freqs_cis" not in name}
    torch.save({"model": state}, tmp_path / "mine.pt")
    with pytest.raises(WeightsError, match="image_size=256 or 384 or 512"):
        opened(tmp_path, "mine.pt", vq=vq)
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(WeightsError, match="unknown model family"):
        opened(tmp_path, "other.pt")


def test_pickles_are_refused_where_torch_cannot_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.6 `weights_only` does not keep a file from running code."""
    file = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(2)}, file)
    assert "weight" in open_checkpoint(file)
    monkeypatch.setattr(torch, "__version__", "2.5.1a0+git")
    with pytest.raises(WeightsError, match=r"torch 2\.6"):
        open_checkpoint(file)


# ------------------------------------------------------------------------------------ keys of config.json

# Of each checkpoint: its section of the network that draws
ALIKE = ("janus-pro-hub", "anole-hub")  # the keys of another one, elsewhere
NETWORKS = {
    "llamagen-t2i-512": "",
    "anole": "",
    "anole-hub": "",
    "lumina-mgpt": "",
    "lumina-mgpt-2.0": "",
    "janus-pro": "language_config",
    "janus-pro-hub": "text_config",
    "emu3": "text_config",
    "emu3-authors": "",
    "simplear": "",
    "mammothmoda2": "llm_config.text_config",
    "emu3.5-image": "",
    "glm-image": "text_config",
}
# What changes nothing that is computed, or nothing that the tensors do not say
INERT = set(
    """
    _name_or_path architectures attention_dropout caption_dim chunk_size_feed_forward cls_token_num dtype
    extra_gen_vocab gen_vocab_size id2label initializer_range input_type is_encoder_decoder label2id mask_image_logits
    max_position_embeddings max_window_layers model_parallel_size model_type num_classes output_attentions
    output_hidden_states pretraining_tp problem_type return_dict sliding_window tie_word_embeddings torch_dtype
    transformers_version use_cache vision_config vocab_size vocabulary_map vq_config z_loss_weight
    """.split()
)
INERT_THERE = {
    "llamagen-t2i-512": {"hidden_size", "intermediate_size", "num_key_value_heads"},
    "mammothmoda2": {"mrope_section"},  # positions are the same on all axes
    "emu3.5-image": {"image_area"},  # of pictures that it reads; those it draws are of known sizes
}


def flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Keys of a section and of those in it, "section.key"."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        inner = flat(value, f"{before}{name}.") if isinstance(value, dict) else {}
        result |= inner or {before + name: value}
    return result


def other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [other(each) for each in value]
    return 2 * value + 1 if isinstance(value, int | float) else "another"


def with_key(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    inner = values.get(name)
    inner = inner if isinstance(inner, dict) else {}
    return values | {name: with_key(inner, rest, value) if rest else value}


@pytest.mark.parametrize(
    "about",
    [
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
        {"rope_scaling": {"factor": 8.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
    ],
    ids=str,
)
def test_rotary_positions_of_other_kinds_are_refused(public: Path, about: dict[str, Any]) -> None:
    """Also where their kind is not said, or is said of each kind of layer."""
    stored = open_checkpoint(public / "anole")
    with pytest.raises(WeightsError, match=r"rope_(scaling|parameters).* is .*, where .* is known"):
        check_keys(stored, about, LLAMA)
    check_keys(stored, {"rope_scaling": {"type": "default", "factor": 1.0}}, LLAMA)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in NETWORKS],
)
def test_every_key_of_config_json_is_read_or_refused(
    public: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each is set to another value: the file is refused, by the key's name where that is all, or another network."""
    if not (public / name).is_dir():
        pytest.skip("the installed transformers lacks it")
    parts = replace(find_parts(str(public / name), optional=("pixels",)), drafter=None)
    about, stored = settings_beside(parts.target), open_checkpoint(parts.target)
    monkeypatch.setattr(load, "open_checkpoint", lambda _: stored)
    monkeypatch.setattr(load, "open_vq", lambda *_: (None, None))
    monkeypatch.setattr(load, "check_vq", lambda *_: None)

    def network(about: dict[str, Any]) -> Any:
        monkeypatch.setattr(load, "settings_beside", lambda _: about)
        return open_model(parts).config.target

    usual, section, keys = (
        network(about),
        NETWORKS[name],
        family_of(Files(stored, about, parts)).all_keys,
    )
    there = flat(about)
    names = [n for n in there if n.startswith(section and f"{section}.")]
    inert = INERT | INERT_THERE.get(name, set())
    names = [n for n in names if not {*n.removeprefix(section).split(".")} & inert]
    names = [n for n in names if not n.endswith("_token_id")]
    assert len(names) >= 5
    for path in dict.fromkeys([*names, *keys]):
        known = keys.get(path)
        value = other(there.get(path, known[0] if isinstance(known, tuple) else known))
        try:
            result, said = network(with_key(about, path, value)), ""
        except WeightsError as error:
            result, said = usual, str(error)
        assert said or result != usual, f"{path} is neither read nor refused"
        assert path not in keys or not said or f"{path} is " in said
