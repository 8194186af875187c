"""The embedded model's training, all stages at toy size: pictures to codes, a target, a folder, a drawing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional

from lantern_hpu import cli
from lantern_lab.embedded import train_target, training
from lantern_lab.embedded.picture_losses import PerceptualLoss, balanced
from lantern_lab.embedded.pictures import Stream, noise, painted, to_float
from lantern_lab.embedded.training import Learner, Muon, Run
from lantern_lab.evaluate.attributes import Classifier
from lantern_lab.scenes import caption_of, paint_picture, sample_scene

LAB = "lantern_lab.embedded."
TARGET = f"{LAB}train_target --dim 64 --layers 1 --batch 4 --accumulate 1 --measured 8"
GENERATE = "lantern_hpu generate --model model --prompt apples --output"
STAGES = (
    f"{LAB}train_tokenizer --steps 2 --warm-up 1 --batch 4 --measured 8 --codebook-pictures 64",
    f"{TARGET} --minutes 0.02",
    f"{TARGET} --minutes 0.04 --resume",
    f"{LAB}export --output model",
    f"{LAB}scene_tokens --pictures 34",
    "lantern_hpu train drafter --model model --data prompts.txt --tokens data/scenes.npz --samples 0 "
    "--steps 2 --batch 1 --measured 1 --aux-layers 0 --output drafter",
    f"{LAB}export --drafter drafter --only drafter --output model",
    f"{LAB}export --drafter drafter --output model",
    f"{GENERATE} apple.png",
)
# A decoder that is trained anew on the model's codes leaves encoder and codebook as they are
DECODER = f"{LAB}train_tokenizer --keep-codes --start model --steps 3 --batch 4 --measured 16 "
DECODER += "--adversarial-from 0.3 --data-dir finer"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Runs a command of Python's `-m` in this process and an empty folder."""
    monkeypatch.chdir(tmp_path)

    def command(line: str) -> None:
        module, *options = line.split()
        monkeypatch.setattr(sys, "argv", [module, *options])
        main = cli.main if module == "lantern_hpu" else import_module(module).main
        assert not main()

    yield command
    train_target.tokenizer.cache_clear()
    torch.set_num_threads(1)


@pytest.mark.slow
def test_all_stages_run_one_after_the_other(run: Callable[[str], None]) -> None:
    scenes = [sample_scene(np.random.default_rng(i)) for i in range(12)]
    captions = {caption_of(scene, np.random.default_rng(0)) for scene in scenes}
    Path("prompts.txt").write_text("\n".join(captions))
    for stage in STAGES:
        run(stage)
    assert "lighthouse" in json.loads(Path("data/words.json").read_text())
    assert Image.open("apple.png").size == (128, 128)
    run(DECODER)
    old, new = load_file("model/vq.safetensors"), load_file("finer/tokenizer.safetensors")
    changed = {name for name, weight in old.items() if not torch.equal(new[name].half(), weight)}
    assert "decoder.conv_out.weight" in changed  # half precision holds what came from it
    assert all(name.startswith(("decoder.", "post_quant_conv.")) for name in changed)
    curve = json.loads(Path("finer/runs/tokenizer/curve.json").read_text())
    assert curve[-1]["step"] == 3 and curve[-1]["training_discriminator"] > 0
    target = Path("model/target.safetensors").read_bytes()
    run(f"{LAB}export --only tokenizer --output model --data-dir finer")
    assert Path("model/target.safetensors").read_bytes() == target
    decoder = load_file("model/vq.safetensors")["decoder.conv_out.weight"]
    assert torch.equal(decoder, new["decoder.conv_out.weight"].half())
    run(f"{GENERATE} cup.png")


@pytest.mark.slow
def test_the_attribute_network_resumes_to_the_same_weights(run: Callable[[str], None]) -> None:
    sizes = f"{LAB}train_attributes --pictures 64 --batch 16 --epochs 2 --measured 70 --threads 1"
    for folder, more in (("whole", ""), ("half", "--stop 5"), ("half", "--resume")):
        run(f"{sizes} --data-dir {folder} --output {folder}.safetensors {more}")
    resumed = load_file("half.safetensors")
    for name, value in load_file("whole.safetensors").items():
        assert torch.equal(resumed[name], value)
    Classifier.load(Path("whole.safetensors"))


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas in float32 on every machine, also where bfloat16 is native."""
    monkeypatch.setattr(training, "native_bfloat16", lambda: False)


def learner_of(replicas: int) -> Learner:
    torch.manual_seed(0)
    return Learner(torch.nn.Linear(4, 3), replicas, decay=0.01, clip=1.0, average=0.9)


def test_replicas_sum_to_the_gradient_of_the_whole() -> None:
    learner = learner_of(2)
    batches = [torch.randn(5, 4) for _ in range(4)]

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch).square().mean()
        return out

    got = learner.gradients(loss, batches)
    whole = torch.nn.Linear(4, 3)
    for parameter, weight in zip(whole.parameters(), learner.weights, strict=True):
        parameter.data = weight.clone()
    want = torch.stack([loss(whole, batch) for batch in batches]).mean()
    want.backward()
    assert got == pytest.approx(want.item(), rel=1e-5)
    for weight, parameter in zip(learner.weights, whole.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, parameter.grad)


def test_muon_moves_along_the_nearest_orthogonal_matrix() -> None:
    """Against the singular value decomposition: all singular values of the update come near 1."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32))
    got = Muon([x], 0.0, torch.float32).orthogonal(x)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    values = torch.linalg.svdvals(got)
    assert values.min() > 0.6 and values.max() < 1.3
    assert torch.nn.functional.cosine_similarity(got.flatten(), (u @ v).flatten(), 0) > 0.98


def test_a_run_that_is_cut_off_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    def begun() -> Run:
        return Run(tmp_path, {"learner": learner_of(1)}, minutes=1)

    def steps(run: Run, count: int) -> None:
        for _ in range(count):
            batch, learner = torch.randn(5, 4, generator=run.generator), run.parts["learner"]
            assert isinstance(learner, Learner)
            learner.gradients(lambda model, batch: model(batch).square().mean(), [batch])
            learner.step(0.01, run.step)
            run.step += 1

    whole = begun()
    steps(whole, 6)
    first = begun()
    steps(first, 3)
    first.save()
    second = begun()
    second.resume()
    steps(second, 3)
    assert second.step == 6
    for got, want in zip(
        *(run.parts["learner"].state_dict()["weights"] for run in (second, whole)), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.slow
def test_the_compiler_changes_speed_alone() -> None:
    """Two replicas, compiled one after the other and then run on threads, against plain ones."""

    def losses(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        learner = Learner(model, 2, decay=0.01, clip=1.0, average=0.9, compiled=compiled)
        found = []
        for step in range(3):
            found.append(
                learner.gradients(lambda m, b: m(b).square().mean(), [torch.ones(5, 4)] * 4)
            )
            learner.step(0.05, step)
        return found

    plain = losses(False)
    assert losses(True) == pytest.approx(plain, rel=1e-4) and plain[0] > plain[2]


@pytest.mark.slow
def test_pictures_are_encoded_as_their_larger_selves() -> None:
    """Painted at the encoder's own size, a picture is the larger one averaged, but for the finest grain."""
    large = to_float(painted(0, 8).pixels)  # [8, 3, 128, 128]
    small = np.stack([paint_picture(number, noise(64)).pixels for number in range(8)])
    apart = functional.avg_pool2d(large, 2) - to_float(small)
    assert apart.abs().mean() < 0.03  # of a range of 2


def test_a_card_is_measured_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command is one that the program takes, and makes its file; what is there is not made again."""
    from lantern_lab.commands import stretch, verify
    from lantern_lab.commands.bench import bench_request, make_parser
    from lantern_lab.measure import card

    ran: list[list[str]] = []
    code = 0

    def run(command: list[str], cwd: Path, env: Any, timeout: float | None) -> Any:
        if timeout == 0:
            raise subprocess.TimeoutExpired(command, timeout)
        ran.append(command[3:])
        Path(cwd, command[-1]).write_text("{}")
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    data, output = tmp_path / "data", tmp_path / "results"
    asked = ["--name", "h", "--data-dir", str(data), "--output", str(output)]
    assert card.main([*asked, "--minutes", "0"]) == 0 and not ran
    assert "xl and what follows is left for the next time" in capsys.readouterr().err
    assert card.main(asked) == 0
    (_, widen, *widened), *benches, (asks, *about) = ran
    assert asks == "verify" and verify.make_parser().parse_args(about).minutes == 2
    assert widen == "stretch" and stretch.make_parser().parse_args(widened).to == "llamagen-xl"
    one, several, *small = (bench_request(make_parser().parse_args(given[1:])) for given in benches)
    assert one.batches == [1] and several.batches == [1, 8] and one.settings == several.settings
    assert one.model == "xl" and one.options.device == "cuda" and one.interleave
    forms = [(bench.model, bench.options.quantize) for bench in small]
    stage = [("glm-image", form) for form in (None, "int8", "int4")]
    assert forms == [("xl", "int8"), ("xl", "int4"), *stage]
    assert all(bench.random_weights == (bench.model == "glm-image") for bench in small)
    made = sorted(file.name for file in output.iterdir())
    assert {"xl-h-batches.json", "xl-h.json", "verify-h.json"} < {*made} and len(made) == 8
    assert card.main(asked) == 0 and len(ran) == 9
    assert capsys.readouterr().err.count("is there") == 9
    code = 2  # a command that fails ends the run, and leaves no file
    assert card.main([*asked, "--name", "other", "--model", "builtin"]) == 2 and len(ran) == 10
    assert not (output / "builtin-other.json").exists()


def test_what_was_renewed_is_left_out_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lantern_lab.measure import renew

    ran: list[str] = []
    monkeypatch.setattr(renew, "run", lambda task, work: ran.append(task.command))
    monkeypatch.setattr(sys, "argv", ["renew", "--data-dir", str(tmp_path)])
    assert renew.main() == 0
    everything = [task.command for task in renew.tasks(1000, "cpu").values()]
    assert ran == everything
    assert renew.main() == 0 and ran == everything
    monkeypatch.setattr(sys, "argv", ["renew", "--data-dir", str(tmp_path), "--only", "tables"])
    assert renew.main() == 0 and ran == [*everything, "scripts.docs.figures"]
    monkeypatch.setattr(sys, "argv", ["renew", "--data-dir", str(tmp_path), "--only", "tabels"])
    assert renew.main() == 2 and len(ran) == len(everything) + 1


@pytest.mark.slow
def test_the_stream_goes_on_where_it_ended() -> None:
    first = Stream(painted, 2)
    batches = [first.batch() for _ in range(2)]
    again = Stream(painted, 2, first=2).batch()
    assert np.array_equal(again.pixels, batches[1].pixels) and again.captions == batches[1].captions


def test_the_adversarial_gradient_gets_its_share() -> None:
    """At the decoder's last weights it is as large as asked, whatever the scale of its loss."""
    generator = torch.Generator().manual_seed(0)
    last = torch.nn.Parameter(torch.rand(3, 4, generator=generator))
    features, real = torch.rand(4, 6, generator=generator), torch.rand(3, 6, generator=generator)

    def gradient(scale: float, share: float) -> torch.Tensor:
        drawn = last @ features  # [3, 6]
        loss, adversarial = (drawn - real).square().mean(), scale * drawn.sin().mean()
        total = balanced(loss, adversarial, drawn, last, share)
        return torch.autograd.grad(drawn, last, total)[0]

    alone = gradient(1.0, 0.0)
    for scale in (1e-3, 1e3):
        added = gradient(scale, 0.5) - alone
        assert added.norm().item() == pytest.approx(0.5 * alone.norm().item(), rel=1e-2)


@pytest.mark.slow
def test_the_perceptual_distance_grows_with_damage() -> None:
    """Blurred and noisy pictures are further from the painted one the more they are so; the same is at 0."""
    distance, real = PerceptualLoss(), to_float(painted(0, 2).pixels)
    noise = torch.randn(real.shape, generator=torch.Generator().manual_seed(0))
    for damage in (
        lambda amount: real + 0.1 * amount * noise,
        lambda amount: functional.avg_pool2d(real, 2 * amount + 1, 1, amount),
    ):
        assert 0 < distance(damage(1), real) < distance(damage(3), real)
    assert distance(real, real) == 0
