"""Training a drafter: it learns, resumes to the same losses, keeps the best, and refuses what cannot work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from lantern_hpu import LanternError, LanternPipeline
from lantern_hpu.core import Request, Sampling
from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.methods.setting import Resolved
from lantern_hpu.models.transformer import Drafter
from lantern_hpu.models.vq import VQModel
from lantern_hpu.tree import DraftTree
from lantern_lab.commands.train import main
from lantern_lab.train import codes, drafter_training
from lantern_lab.train.drafter_training import DrafterTraining, begin, chain, profile
from lantern_lab.train.unroll import Lesson, Unrolled, draw_samples, read_encoded, split
from tests.folder import write_folder

ROOT = Path(__file__).parent.parent
PROMPTS = [
    f"{a} {b}{c}" for a in ("red", "blue") for b in ("apple", "cat") for c in ("", " on", "s")
]
SHORT = "--samples 24 --batch 4 --measure-every 10 --measured 4 --lr 0.01".split()
STEPS = ("--steps", "30")


@pytest.fixture(scope="module", autouse=True)
def _checkpoints() -> Iterator[None]:
    """Every ten steps, so that short runs have some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lantern_lab.train.drafter_training.SAVE_EVERY", 10)
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return file


def train(model: Path, prompts: Path, output: Path, *options: str) -> int:
    where = ["--model", str(model), "--data", str(prompts), "--output", str(output)]
    return main(["drafter", *where, *SHORT, *options])


@pytest.fixture
def learn(model: Path, prompts: Path, tmp_path: Path) -> Callable[..., int]:
    """Trains in the folder `d`."""
    return partial(train, model, prompts, tmp_path / "d")


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


@pytest.fixture(scope="module")
def trained(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "drafter"
    assert train(model, prompts, folder, *STEPS) == 0
    return folder


def losses(folder: Path) -> list[float]:
    state = torch.load(folder / "state.pt", weights_only=True)
    found: list[float] = state["progress"]["losses"]
    return found


def test_training_learns_and_reports(trained: Path) -> None:
    found = losses(trained)
    assert len(found) == 30 and sum(found[-5:]) < 0.8 * sum(found[:5])
    figures = report(trained)
    assert figures["kept_step"] in (10, 20, 30)
    best = max(figures["curve"], key=lambda point: point["chain"])
    assert best["step"] == figures["kept_step"]
    assert chain(figures["overlaps"]) == pytest.approx(best["chain"], abs=1e-6)
    for method in ("eagle", "lantern++"):
        tried, accepted = figures[method]["tried"], figures[method]["accepted"]
        assert all(sum(a) <= t for a, t in zip(accepted, tried, strict=True))
        # Whoever accepted at one depth tries the next, but at leaves.
        assert all(t <= sum(a) for a, t in zip(accepted, tried[1:], strict=False))
    assert Image.open(trained / "curve.png").size[0] > 400
    steps = f"| `eagle` | {figures['eagle']['tokens_per_step']:.2f} |"
    assert steps in ModelCard.load(trained / "README.md").text


def test_trained_drafter_is_loaded_in_python(model: Path, trained: Path) -> None:
    pipe = LanternPipeline.from_pretrained(str(model))
    before = pipe("a sun", method="eagle")
    pipe.load_drafter(str(trained))
    at_once = LanternPipeline.from_pretrained(str(model), drafter=str(trained))
    after, same = pipe("a sun", method="eagle"), at_once("a sun", method="eagle")
    assert np.array_equal(after.tokens, same.tokens)
    assert before.config["weights"] != after.config["weights"] == same.config["weights"]
    with pytest.raises(LanternError):
        pipe.load_drafter("nowhere")
    assert np.array_equal(pipe("a sun", method="eagle").tokens, after.tokens)


@pytest.mark.slow
def test_interrupted_training_resumes_to_the_same_losses(
    learn: Callable[..., int], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = DrafterTraining.learn

    def interrupted(self: DrafterTraining) -> tuple[float, float]:
        if self.progress.step == 27:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(DrafterTraining, "learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        learn(*STEPS)
    monkeypatch.undo()
    assert len(losses(tmp_path / "d")) == 20  # the checkpoint
    assert learn(*STEPS, "--resume") == 0
    assert losses(tmp_path / "d") == losses(trained)
    assert report(tmp_path / "d") == report(trained)


@pytest.mark.slow
def test_two_processes_train_together(model: Path, prompts: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    where = ["--model", str(model), "--data", str(prompts), "--output", str(tmp_path / "d")]
    command = [*launch, "-m", "lantern_hpu", "train", "drafter", *where, *SHORT, "--steps", "20"]
    subprocess.run(command, check=True, capture_output=True, timeout=900, cwd=ROOT)
    assert len(losses(tmp_path / "d")) == 20
    assert len(list((tmp_path / "d" / "samples").glob("*.npz"))) == 3
    assert report(tmp_path / "d")["eagle"]["tokens_per_step"] > 1


@pytest.mark.slow
def test_drafter_of_a_bfloat16_target_is_trained_in_float32(
    learn: Callable[..., int], tmp_path: Path
) -> None:
    assert learn("--steps", "2", "--dtype", "bfloat16") == 0
    state = torch.load(tmp_path / "d" / "state.pt", weights_only=True)
    assert {w.dtype for w in state["drafter"].values()} == {torch.float32}


def test_interrupted_sampling_goes_on(model: Path, tmp_path: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model), layout="plain")
    accelerator = Accelerator(cpu=True)
    before = draw_samples(pipeline, PROMPTS, 20, tmp_path, accelerator)
    files = sorted(tmp_path.glob("*.npz"))
    times = {file: file.stat().st_mtime_ns for file in files}
    assert len(files) == 3 and len(before.prompts) == 20
    files[1].unlink()
    after = draw_samples(pipeline, PROMPTS, 20, tmp_path, accelerator)
    assert torch.equal(before.tokens, after.tokens)
    for file in files:
        assert (file.stat().st_mtime_ns == times[file]) == (file != files[1])
    with pytest.raises(WeightsError, match="from other prompts"):
        draw_samples(pipeline, PROMPTS[1:], 20, tmp_path, accelerator)


def write_tokens(file: Path, tokens: Any, captions: list[str]) -> Path:
    np.savez(file, tokens=tokens, captions=np.array(captions))
    return file


def known_tokens(folder: Path) -> Path:
    """Two pictures of each prompt."""
    tokens = np.random.default_rng(0).integers(0, 32, (2 * len(PROMPTS), 16))
    return write_tokens(folder / "tokens.npz", tokens, PROMPTS * 2)


def test_pictures_as_tokens_are_learned_from_but_for_held_out_captions(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = len(split(PROMPTS)[1])
    given = ["--tokens", str(known_tokens(tmp_path)), "--samples", "0", "--steps", "10"]
    assert train(model, prompts, tmp_path / "alone", *given) == 0
    assert report(tmp_path / "alone")["samples"] == 2 * (len(PROMPTS) - held)
    assert not (tmp_path / "alone" / "samples").exists()
    assert train(model, prompts, tmp_path / "alone", "--resume", *given) == 0
    other = write_tokens(tmp_path / "other.npz", np.zeros((12, 16), int), PROMPTS)
    assert train(model, prompts, tmp_path / "alone", "--resume", "--tokens", str(other)) == 2
    assert "--tokens cannot change" in capsys.readouterr().err


def painted(file: Path, colour: tuple[int, int, int]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 30), colour).save(file)
    return file


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve classes of a picture each, some in folders of their own, and the same as lines of JSON."""
    folder = tmp_path_factory.mktemp("pictures")
    files = [
        painted(
            folder / "classes" / prompt / ("more" * (i % 2)) / f"{i}.png", (20 * i, 99, 200 - i)
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    lines = [
        {"image_path": f"classes/{f.relative_to(folder / 'classes')}", "text": f"a {f.stem}"}
        for f in files
    ]
    (folder / "lines.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    (folder / "classes" / ".thumbnails").mkdir()
    painted(folder / "classes" / ".thumbnails" / "0.png", (0, 0, 0))
    return folder


@pytest.mark.parametrize("name", ["classes", "lines.jsonl"])
def test_pictures_become_codes_that_a_drafter_is_trained_on(
    name: str, model: Path, pictures: Path, tmp_path: Path
) -> None:
    output = tmp_path / "codes.npz"
    words = ["codes", "--model", str(model), "--data", str(pictures / name), "--output"]
    assert main([*words, str(output)]) == 0 and main([*words, str(output)]) == 2
    loaded = LanternPipeline.from_pretrained(str(model)).model
    found = read_encoded(output, loaded.target.config, ())
    wanted = sorted(PROMPTS) if name == "classes" else [f"a {i}" for i in range(len(PROMPTS))]
    assert found.prompts == wanted and isinstance(loaded.vq, VQModel)
    index = PROMPTS.index(wanted[3]) if name == "classes" else 3
    height, width = loaded.config.image_size
    plain = torch.tensor([20 * index, 99, 200 - index]).view(1, 3, 1, 1).expand(1, 3, height, width)
    codes = loaded.vq.encode(plain / 127.5 - 1).flatten()
    assert found.tokens[3].tolist() == codes.tolist()


CLASSED: dict[
    str, tuple[int, list[str], Any]
] = {  # classes of a model, names of folders: labels, or what is said
    "as many, by their order": (3, ["b", "a", "10"], {"10": "0", "a": "1", "b": "2"}),
    "fewer, by their number": (20, ["3", "11"], {"3": "3", "11": "11"}),
    "fewer, by their name": (1000, ["daisy", "207"], {"daisy": "985", "207": "207"}),
    "unknown": (20, ["daisy"], "an index from 0 to 19"),
    "texts": (0, ["red cat"], {"red cat": "red cat"}),
}


@pytest.mark.parametrize("case", CLASSED)
def test_folders_are_labels_of_a_model_that_draws_by_class(case: str, tmp_path: Path) -> None:
    classes, names, wanted = CLASSED[case]
    for name in names:
        painted(tmp_path / name / "x.png", (1, 2, 3))
    if isinstance(wanted, dict):
        found = {file.parent.name: label for file, label in codes.captioned(tmp_path, classes)}
        assert found == wanted
        return
    with pytest.raises(OptionError, match=wanted):
        list(codes.captioned(tmp_path, classes))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "cat"}', "line 2 of .* has no image_path and text"),
        ('{"image_path": "x.png"}', "line 2 of .* has no image_path and text"),
        ("[", "line 2 of .* is no JSON"),
        ('{"image_path": "x.png", "text": "cat"}', "x.png"),
        ("", "names no pictures"),
    ],
)
def test_pictures_that_cannot_be_encoded_are_refused_by_name(
    line: str, says: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.jsonl").write_text(f"\n{line}")
    words = ["--data", str(tmp_path / "lines.jsonl"), "--output", str(tmp_path / "codes.npz")]
    assert main(["codes", "--model", str(model), *words]) == 2
    assert re.search(says, capsys.readouterr().err)
    assert not (tmp_path / "codes.npz").exists()


def test_fine_tuning_begins_with_the_drafter_there_is(model: Path) -> None:
    as_torch: dict[str, Any] = {"layout": "plain"}  # as training loads it
    known = LanternPipeline.from_pretrained(str(model), **as_torch).model
    own, new = begin(known, True, seed=0), begin(known, False, seed=0)
    assert known.drafter is not None
    for name, weight in known.drafter.state_dict().items():
        assert torch.equal(own.state_dict()[name], weight)
    assert not torch.equal(own.fc.weight, new.fc.weight)
    known.drafter = None
    with pytest.raises(OptionError, match="nothing to fine-tune"):
        begin(known, True, seed=0)


def test_nan_loss_stops_and_keeps_the_last_checkpoint(
    learn: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compare, calls = Unrolled.compare, []

    def broken(self: Unrolled, *given: Any) -> tuple[Tensor, Tensor]:
        calls.extend([1] * torch.is_grad_enabled())  # not when it measures
        loss, overlap = compare(self, *given)
        return (loss * float("nan") if len(calls) > 3 * 15 else loss), overlap

    monkeypatch.setattr(Unrolled, "compare", broken)
    assert learn(*STEPS) == 2
    said = capsys.readouterr().err
    assert "the loss is not a number: in step 16" in said and "--resume with a lower --lr" in said
    state = torch.load(tmp_path / "d" / "state.pt", weights_only=True)
    assert state["progress"]["step"] == 10
    assert all(bool(w.isfinite().all()) for w in state["drafter"].values())


def test_full_disk_is_said_and_leaves_no_half_file(
    learn: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert learn("--steps", "1") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not [file for file in (tmp_path / "d").rglob("*") if file.is_file()]


BAD: dict[str, tuple[list[str], Any, list[str]]] = {  # prompts, tokens, options
    "too few prompts: 9 different ones": (PROMPTS[:9], None, []),
    "too few prompts: 5 different ones": (PROMPTS[:5] * 4, None, []),
    "holds no prompts": ([], None, []),
    "--steps is 0": (PROMPTS, None, ["--steps", "0"]),
    "--lr is nan": (PROMPTS, None, ["--lr", "nan"]),
    "nothing to resume": (PROMPTS, None, ["--resume"]),
    "does not fit the model: int64 [12, 15]": (PROMPTS, np.zeros((12, 15), int), []),
    "does not fit the model: float64": (PROMPTS, np.zeros((12, 16)), []),
    "tokens from 32 to 32": (PROMPTS, np.full((12, 16), 32), []),
    "cannot read tokens": (PROMPTS, b"no archive", []),
    **{
        f"--aux-layers is {layers}": (PROMPTS, None, [f"--aux-layers={layers}"])
        for layers in ("9", "0,0", "1,0", "a", "-1")
    },
}


@pytest.mark.parametrize("said", BAD)
def test_bad_input_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    lines, tokens, options = BAD[said]
    prompts, file = tmp_path / "few.txt", tmp_path / "tokens.npz"
    prompts.write_text("\n".join(lines))
    if isinstance(tokens, bytes):
        file.write_bytes(tokens)
    elif tokens is not None:
        write_tokens(file, tokens, PROMPTS)
    given = [] if tokens is None else ["--tokens", str(file)]
    assert train(model, prompts, tmp_path / "d", *options, *given) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "d" / "state.pt").exists()


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ("", [], "--resume, or another --output"),
        ("another target", ["--resume"], "cannot be used"),
        ("damaged", [*STEPS, "--resume"], "cannot read"),
        ("", [*STEPS, "--resume", "--batch", "7"], "--batch is 7: the run was begun with"),
        ("", [*STEPS, "--resume", "--unroll", "2"], "--unroll is 2: the run was begun with"),
        ("", [*STEPS, "--resume", "--seed", "1"], "samples"),
    ],
)
def test_a_run_is_neither_overwritten_nor_resumed_as_another(
    model: Path,
    prompts: Path,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
    options: list[str],
    said: str,
) -> None:
    folder = shutil.copytree(trained, tmp_path / "d")
    if change == "damaged":
        (folder / "state.pt").write_bytes(b"not a checkpoint")
    before = (folder / "state.pt").read_bytes()
    target = write_folder(tmp_path / "other", seed=5) if change == "another target" else model
    assert train(target, prompts, folder, *options) == 2
    assert said in capsys.readouterr().err
    assert (folder / "state.pt").read_bytes() == before


@pytest.mark.slow
def test_run_resumed_at_its_end_still_reports(
    learn: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seldom = ("--measure-every", "15")
    monkeypatch.setattr(DrafterTraining, "milestone", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        learn(*STEPS, *seldom)
    monkeypatch.undo()
    assert learn("--steps", "5", *seldom, "--resume") == 0
    assert report(tmp_path / "d")["steps"] == 10


def test_held_out_prompts_are_apart_and_do_not_depend_on_their_order() -> None:
    learned, held = split(PROMPTS)
    assert set(learned) | set(held) == set(PROMPTS) and not set(learned) & set(held)
    assert split(PROMPTS[::-1] * 2) == (learned, held)


# Wiring


@pytest.mark.parametrize("prefix", [1, 2, 4, 5])
def test_target_as_its_own_drafter_has_everything_accepted(prefix: int, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", prefix=prefix)
    pipeline = LanternPipeline.from_pretrained(str(folder))
    assert drafter_training.check_wiring(pipeline, "red apple") == "all of its drafts accepted"


def test_wiring_check_notices_a_shifted_feature(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = drafter_training.Echo.forward

    def shifted(self: drafter_training.Echo, tokens: Tensor, *given: Any) -> Tensor:
        return forward(self, (tokens + 1) % 32, *given)

    monkeypatch.setattr(drafter_training.Echo, "forward", shifted)
    with pytest.raises(WeightsError, match="drafting for itself"):
        drafter_training.check_wiring(LanternPipeline.from_pretrained(str(model)), "red apple")


def lesson_of(pipeline: LanternPipeline, aux_layers: tuple[int, ...] = ()) -> Lesson:
    tokens = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
    return Lesson(pipeline.model, ["red cat", "blue apple on red"], tokens, aux_layers)


@pytest.mark.parametrize(
    "sampling", [Sampling(2.0), Sampling(1.0, 0.7), Sampling(3.0, 1.0, 5, 0.9)], ids=str
)
def test_lesson_holds_the_probabilities_that_decoding_draws_from(
    model: Path, sampling: Sampling
) -> None:
    """A guess that is the target's own feature overlaps with p entirely, in every pass."""
    pipeline = LanternPipeline.from_pretrained(str(model), layout="plain")
    pipeline.model.sampling = sampling
    lesson = lesson_of(pipeline)
    drafter = pipeline.model.drafter
    assert drafter is not None
    unrolled = Unrolled(drafter, pipeline.model.target, 3)
    for level in range(3):
        _, overlap = unrolled.compare(lesson.hidden[:, 1:], lesson, level)
        # A guess is not filtered, so that there is a gradient: some of its mass lies elsewhere.
        assert float(overlap) == pytest.approx(1, abs=1e-5) or sampling.top_k
        assert float(overlap) > 0.3


def chain_at(drafter: Drafter, lesson: Lesson, last: int, drafts: int) -> Tensor:
    """What a chain guesses [R, H] after the target's features up to entry `last`, entry by entry."""
    features, *aux = lesson.features[:, : last + 1].split(drafter.config.dim, -1)
    for read, x in zip(drafter.aux, aux, strict=True):
        features = features + read(x)
    for entry in range(last + 1, last + drafts + 2):
        mask = lesson.mask(drafter, 0)[..., :entry, :entry]
        guess = drafter(lesson.tokens[:, :entry], features, lesson.rope[:, :entry], mask)
        features = torch.cat([features, guess[:, -1:]], 1)
    return guess[:, -1]


@pytest.mark.parametrize("aux_layers", [(), (0,)])
def test_passes_guess_what_a_chain_of_drafts_guesses(
    model: Path, aux_layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All places at once, as a chain that is drafted at each place by itself."""
    pipeline = LanternPipeline.from_pretrained(str(model), layout="plain")
    lesson = lesson_of(pipeline, aux_layers)
    drafter = begin(pipeline.model, True, 0, aux_layers)
    found: list[Tensor] = []
    compare = Unrolled.compare

    def kept(self: Unrolled, guess: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        found.append(guess)
        return compare(self, guess, *more)

    monkeypatch.setattr(Unrolled, "compare", kept)
    with torch.no_grad():
        for weight in drafter.aux.parameters():
            weight.normal_(std=0.1)
        Unrolled(drafter, pipeline.model.target, 3)(lesson)
        for level, token in [(0, 0), (0, 14), (1, 3), (1, 14), (2, 2), (2, 14)]:
            place = lesson.first + token
            want = chain_at(drafter, lesson, place - level, level)
            torch.testing.assert_close(found[level][:, place], want)


def test_a_drafter_that_reads_lower_layers_draws_what_the_target_draws(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    """Greedy, so that every draft must be what the target alone draws; on both kinds of trees."""
    folder, layers = tmp_path / "drafter", ("--aux-layers", "0")
    assert train(model, prompts, folder, "--steps", "10", "--finetune", *layers) == 0
    pipeline = LanternPipeline.from_pretrained(str(model), drafter=str(folder))
    drafter = pipeline.model.drafter
    assert drafter is not None and drafter.aux_layers == (0,)
    saved = load_file(folder / "drafter.safetensors")
    assert all(weight.any() for name, weight in saved.items() if name.startswith("aux."))
    alone = pipeline("red cat", method="ar", temperature=0.0).tokens
    for method in ("eagle", "eagle2"):
        assert np.array_equal(pipeline("red cat", method=method, temperature=0.0).tokens, alone)


def test_profile_counts_what_the_report_counts(model: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model))
    tree = DraftTree.from_paths("small", [[0], [1], [2], [0, 0], [0, 1], [1, 0]])
    requests = [Request("red cat", seed, pipeline.model.sampling) for seed in range(6)]
    engine = pipeline.engines.make(pipeline.spec(requests, tree, len(requests)), "eager")
    found = profile(engine, partial(pipeline.prefix, engine), requests)
    result = pipeline.draw(requests, Resolved("eagle", tree=tree), 6)
    by_depth = [sum(r.accepted_by_depth[d] for r in result.records) for d in range(2)]
    assert [sum(ranks) for ranks in found["accepted"]] == by_depth
    assert found["tried"][0] == sum(r.steps for r in result.records)
    parents = sum(found["accepted"][0][:2])  # the third child has no children
    assert parents - 6 <= found["tried"][1] <= parents  # at the end of an image nothing follows
