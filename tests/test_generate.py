"""The front door: what a user types, gets, and reads when it cannot work."""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file

from lantern_hpu import __version__, cli
from lantern_hpu.commands.generate import main
from lantern_hpu.core import Request, Sampling
from lantern_hpu.errors import OutputError
from lantern_hpu.fields import MAX_SEED
from lantern_hpu.files import write_file
from lantern_hpu.methods.relaxation import Multiplicative
from lantern_hpu.methods.setting import METHODS, Setting
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import CAPTION, METADATA, is_cut_off, read_png
from tests.folder import write_folder
from tests.marks import mostly_slow


def generate(model: Path, *options: object) -> int:
    return cli.main(["generate", "--model", str(model), *map(str, options)])


def pixels(file: Path) -> np.ndarray:
    return np.asarray(Image.open(file))


@pytest.mark.parametrize("method", mostly_slow(METHODS, "ar", "lantern++", "scd"))
def test_each_method_draws_under_strict(model: Path, tmp_path: Path, method: str) -> None:
    options = ["--prompt", "a red apple", "--num-images", 2, "--method", method]
    options += ["--graphs", "strict"]
    report = tmp_path / "report.json"
    assert generate(model, *options, "--output", tmp_path / "out", "--report", report) == 0
    files = sorted((tmp_path / "out").glob("*.png"))
    assert [f.name for f in files] == ["000-a-red-apple.png", "001-a-red-apple.png"]
    assert all(Image.open(f).size == (8, 8) for f in files)
    assert not np.array_equal(pixels(files[0]), pixels(files[1]))
    data = json.loads(report.read_text())
    assert data["graph"]["runner"] == "strict" and data["graph"]["recompiles_after_warmup"] == 0
    assert data["graph"]["captures"] == 2


def test_report_keeps_its_contract(model: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    asked = ("--prompt", "cat", "--output", tmp_path / "cat.png", "--report", report)
    assert generate(model, *asked) == 0
    data = json.loads(report.read_text())
    assert set(data) == {"images", "warnings", "timing", "graph", "config", "environment"}
    (image,) = data["images"]
    names = "file prompt seed tokens steps tokens_per_step accepted_by_depth relaxed_accepts"
    tv = {"tv_sum", "tv_mean", "tv_max"}
    assert set(image) == set(names.split()) | tv
    assert image["relaxed_accepts"] == 0 or 0 < image["tv_mean"] <= image["tv_max"] <= 1
    assert image["tv_sum"] == pytest.approx(image["tv_mean"] * (image["tokens"] - 1))
    names = "import_s load_s warmup_s text_s generate_s decode_s ms_per_step"
    assert set(names.split()) <= set(data["timing"])
    names = "runner captures replays recompiles_after_warmup host_reads"
    assert set(names.split()) <= set(data["graph"])
    gained = sum(image["accepted_by_depth"]) + image["steps"]  # drafts and bonus tokens
    assert image["tokens"] - 1 <= gained <= image["tokens"]
    assert image["tokens_per_step"] == pytest.approx(
        (image["tokens"] - 1) / image["steps"], abs=1e-3
    )
    assert image["file"] == str(tmp_path / "cat.png")


REPLAYS = {
    "sampling": "--num-images 3 --temperature 0.9 --top-k 12 --method auto:delta=0.2:k=4",
    "a tree of the user's own": "--method auto@mine.json",
    "weights of 8 bits": "--quantize int8",
    "weights of 4 bits": "--quantize int4",
    "a window": "--method sjd-pac:lambda-5@9:2x3",
    "a schedule": "--method scd@9:commit=3",
    "a budget": "--method scd:tv=0.2:budget=0.7@4",
}


@pytest.mark.parametrize("options", REPLAYS.values(), ids=REPLAYS)
def test_an_image_is_drawn_again_from_its_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_text("[[0], [1], [0, 0]]")
    asked = ("--prompt", "red cat", "--seed", 40, "--output", "drawn/", *options.split())
    assert generate(model, *asked) == 0
    Path("mine.json").unlink()
    last = sorted(Path("drawn").iterdir())[-1]
    known = read_png(last)
    assert known["seed"] == (42 if "--num-images" in options else 40)
    assert known["config"]["quantize"] == (options[-4:] if "--quantize" in options else None)
    assert main(["--from-png", str(last), "--output", "again.png"]) == 0
    assert np.array_equal(pixels(last), pixels(Path("again.png")))


def test_saved_tokens_are_each_images_own(model: Path, tmp_path: Path) -> None:
    asked = ("--prompt", "red cat", "--method", "eagle", "--num-images", 3, "--force")
    for size in (1, 3):
        files = ("--output", tmp_path / "out", "--save-tokens", tmp_path / f"{size}.npz")
        assert generate(model, *asked, *files, "--batch-size", size) == 0
    alone, together = np.load(tmp_path / "1.npz")["tokens"], np.load(tmp_path / "3.npz")["tokens"]
    assert np.array_equal(alone, together) and not np.array_equal(alone[0], alone[1])


def test_each_png_holds_its_own_settings(pipeline: LanternPipeline, tmp_path: Path) -> None:
    hot, cold = (Request("cat", 1, Sampling(temperature=t)) for t in (1.0, 0.5))
    result = pipeline.draw([hot, cold], pipeline.resolve("eagle"))
    for index, name in enumerate(("hot.png", "cold.png")):
        write_file(tmp_path / name, result.png(index))
        again = tmp_path / f"again-{name}"
        assert main(["--from-png", str(tmp_path / name), "--output", str(again)]) == 0
        assert np.array_equal(pixels(again), pixels(tmp_path / name))


def test_replay_takes_the_threads_of_the_image(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another number the tokenizer's convolutions sum in another order."""
    file, again = tmp_path / "cat.png", tmp_path / "again.png"
    before, cores = torch.get_num_threads(), os.cpu_count() or 1
    try:
        assert generate(model, "--prompt", "cat", "--threads", 1, "--output", file) == 0
        torch.set_num_threads(cores)
        assert main(["--from-png", str(file), "--output", str(again)]) == 0
        assert torch.get_num_threads() == 1 and again.read_bytes() == file.read_bytes()
        assert "threads" not in capsys.readouterr().err
        words = ["--from-png", str(file), "--force", "--output", str(again)]
        assert main([*words, "--threads", str(cores)]) == 0
        assert torch.get_num_threads() == cores
        assert ("drawn with --threads 1" in capsys.readouterr().err) == (cores > 1)
        change_metadata(file, "environment", threads=10**6)  # more than there are
        assert main(words) == 0
        assert "drawn with --threads 1000000" in capsys.readouterr().err
    finally:
        torch.set_num_threads(before)


def test_replay_takes_no_options_from_a_strangers_image(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, kept = tmp_path / "cat.png", tmp_path / "kept.png"
    kept.write_bytes(b"precious")
    result = LanternPipeline.from_pretrained(str(model))("cat")
    result.config["parts"] = {"force": True, "nonsense": 1}
    file.write_bytes(result.png(0))
    assert main(["--from-png", str(file), "--output", str(kept)]) == 2
    assert "--force" in capsys.readouterr().err and kept.read_bytes() == b"precious"


def change_metadata(file: Path, section: str, **values: Any) -> None:
    """Other values in what a PNG holds about itself."""
    with Image.open(file) as image:
        known, info = json.loads(image.text[METADATA]), PngInfo()
        known[section] |= values
        info.add_itxt(METADATA, json.dumps(known))
        image.save(file, pnginfo=info)


def give_other_weights(folder: Path, part: str) -> str:
    """Double the weights of a part of a model folder. -> the checksum that it had"""
    stored = folder / f"{part}.safetensors"
    save_file({n: t * 2 for n, t in load_file(stored).items()}, stored)
    config = json.loads((folder / "model.json").read_text())
    before = config["files"][stored.name]
    config["files"][stored.name] = hashlib.sha256(stored.read_bytes()).hexdigest()
    (folder / "model.json").write_text(json.dumps(config))
    return str(before)


@pytest.mark.parametrize(
    ("part", "hint"), [("drafter", "--drafter"), ("target", "--model"), ("vq", "the same tokens")]
)
def test_replay_refuses_other_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, hint: str
) -> None:
    """And says what to do, and which version drew it at which size."""
    folder, file = write_folder(tmp_path / "model"), tmp_path / "cat.png"
    assert generate(folder, "--prompt", "cat", "--method", "eagle", "--output", file) == 0
    before = give_other_weights(folder, part)
    assert main(["--from-png", str(file), "--output", str(tmp_path / "again.png")]) == 2
    message = capsys.readouterr().err
    assert "other weights" in message and hint in message
    width, height = Image.open(file).size
    assert f"lantern_hpu {__version__} drew it at {width} x {height} pixels" in message
    assert f"{part}.safetensors {before[:8]}" in message


def test_replay_does_not_ask_for_a_drafter_that_drew_nothing(tmp_path: Path) -> None:
    folder, file, again = (tmp_path / name for name in ("model", "cat.png", "again.png"))
    write_folder(folder)
    assert generate(folder, "--prompt", "cat", "--method", "scd", "--output", file) == 0
    give_other_weights(folder, "drafter")
    assert main(["--from-png", str(file), "--output", str(again)]) == 0
    assert np.array_equal(np.asarray(Image.open(again)), np.asarray(Image.open(file)))


def test_an_image_of_a_stretched_model_says_how_to_write_its_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version 0.3 stretched a model while it was loaded, and noted `stretch` in every image."""
    file, again = tmp_path / "x.png", tmp_path / "again.png"
    assert generate(model, "--prompt", "cat", "--output", file) == 0
    for name, code in ((None, 0), ("llamagen-xl", 2)):
        change_metadata(file, "config", stretch=name)
        assert main(["--from-png", str(file), "--output", str(again)]) == code
    assert "lantern-hpu models stretch llamagen-xl --output FOLDER" in capsys.readouterr().err


def test_what_is_out_of_range_is_refused_before_a_model_is_opened(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch of an image to draw again, its changed metadata, and a seed past a gap of numbered prompts."""
    monkeypatch.chdir(tmp_path)
    assert generate(model, "--prompt", "cat", "--output", "x.png") == 0
    changes = {"seed.png": {"seed": -1}, "prompt.png": {"prompt": " "}}
    for name, change in changes.items():
        with Image.open("x.png") as image:
            info = PngInfo()
            info.add_itxt(METADATA, json.dumps(json.loads(image.text[METADATA]) | change))
            image.save(name, pnginfo=info)
    Path("gap.json").write_text('["cat", "", "dog"]')
    gap = ["--prompts-file", "gap.json", "--seed", str(MAX_SEED - 1)]
    refused = {
        "--batch-size is 0": ["--from-png", "x.png", "--batch-size", "0"],
        "--seed is -1": ["--from-png", "seed.png"],
        "the prompt is empty": ["--from-png", "prompt.png"],
        f"--seed is {MAX_SEED + 1}": gap,
    }
    for said, options in refused.items():
        assert main([*options, "--model", "nowhere", "--output", "y.png"]) == 2
        assert said in capsys.readouterr().err


def test_grid_tokens_and_previews_are_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANTERN_HPU_PREVIEW_EVERY", "1")
    sheet, tokens = tmp_path / "sheet.png", tmp_path / "tokens.npz"
    options = ["--prompt", "cat", "--method", "eagle", "--num-images", 3, "--grid"]
    options += ["--save-tokens", tokens]
    assert generate(model, *options, "--output", sheet) == 0
    assert Image.open(sheet).size == (2 * 12 + 4, 2 * (12 + CAPTION) + 4)
    saved = np.load(tokens)
    assert saved["tokens"].shape == (3, 16) and list(saved["seeds"]) == [0, 1, 2]
    assert (tmp_path / "sheet.preview.png").exists()


def test_nothing_is_overwritten_unasked(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cat.png"
    file.write_text("precious")
    assert generate(model, "--prompt", "cat", "--output", file) == 2
    assert file.read_text() == "precious" and "--force" in capsys.readouterr().err
    assert generate(model, "--prompt", "cat", "--output", file, "--force") == 0
    assert Image.open(file).size == (8, 8)


@pytest.mark.parametrize(
    ("load", "more", "said"),
    [
        (0.1, (), "warming up\n"),
        (99.0, (), "warming up: load 99 on"),
        (99.0, ("--threads", "1"), "warming up\n"),
    ],
)
def test_a_long_warm_up_shows_a_line_and_what_makes_it_slow(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    load: float,
    more: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr("lantern_hpu.results.progress.SILENT", 0.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    assert generate(model, "--prompt", "cat", "--output", tmp_path / "x.png", *more) == 0
    shown = capsys.readouterr().err
    assert said in shown and ("--threads 1 is faster now" in shown) == (": load" in said)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("a red cat on blue apple zebra", "longer than 4 words"),
        ("赤いりんご", "no word of it is known"),
        ("zebra cat", "does not know: zebra; it knows apple, blue, cat, on, red"),
    ],
)
def test_long_and_unknown_words_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: str, said: str
) -> None:
    report = tmp_path / "x.json"
    asked = ("--prompt", prompt, "--output", tmp_path / "x.png", "--report", report)
    assert generate(model, *asked) == 0
    assert said in capsys.readouterr().err
    assert any(said in warning for warning in json.loads(report.read_text())["warnings"])


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_damaged_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    folder = write_folder(tmp_path / "model")
    drafter, vq = folder / "drafter.safetensors", folder / "vq.safetensors"
    data = drafter.read_bytes()
    if how == "missing":
        drafter.unlink()
        vq.unlink()
    elif how == "flipped":
        drafter.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    else:
        drafter.write_bytes(data[: len(data) // 2])
    assert generate(folder, "--prompt", "cat", "--output", tmp_path / "x.png") == 2
    shown = capsys.readouterr().err
    assert drafter.name in shown and (vq.name if how == "missing" else "checksum") in shown
    assert not (tmp_path / "x.png").exists()


def test_failed_write_leaves_no_half_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a disk that is full after 1000 bytes
    try:
        with pytest.raises(OutputError, match="cannot write"):
            write_file(tmp_path / "big.bin", b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_call_of_a_kind_builds_an_engine(pipeline: LanternPipeline) -> None:
    pipeline("cat", method="scd")
    count = len(pipeline.engines.engines)
    pipeline("apple", method="scd", seed=9, guidance_scale=3.0, temperature=0.8)
    assert len(pipeline.engines.engines) == count
    pipeline("apple", method="ar")
    assert len(pipeline.engines.engines) == count + 1


def test_host_reads_are_rare(pipeline: LanternPipeline) -> None:
    for method in METHODS:
        assert pipeline("cat", method=method).graph["host_reads"] <= 24


def test_relaxation_off_needs_no_codebook(pipeline: LanternPipeline) -> None:
    pipeline.model._near.clear()
    exact = pipeline("cat", method="eagle")
    assert not pipeline.model._near
    relaxed = pipeline("cat", method=Setting("auto", Multiplicative(4, lam=1.0)))
    assert not pipeline.model._near
    assert np.array_equal(exact.tokens, relaxed.tokens)


def test_int8_weights_are_the_rounded_ones(model: Path) -> None:
    as_torch: dict[str, Any] = {"layout": "plain"}
    whole = LanternPipeline.from_pretrained(str(model), **as_torch).model.target
    small = LanternPipeline.from_pretrained(str(model), quantize="int8", **as_torch).model.target
    for mine, other in zip(small.layers, whole.layers, strict=True):
        weight = other.get_parameter("ffn.down.weight")  # [H, F]
        step = weight.abs().amax(1, keepdim=True) / 127.5  # a row's scale
        rounded: Any = mine.get_submodule("ffn.down")
        error = (rounded.dequantized(torch.float32) - weight).abs()
        assert error.max() > 0 and bool((error <= 0.51 * step).all())
    assert small.head.weight.dtype == torch.int8
    assert torch.equal(small.embed.weight, whole.embed.weight)


def resumed(model: Path, folder: Path, *options: object) -> int:
    return generate(model, *options, "--output", folder, "--resume")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--prompt", "a lemon", "--prompt", "cat"], "001-apple.png is not of this run"),
        (["--prompt", "cat", "--num-images", 3], "001-apple.png is not of this run"),
        (["--prompt", "cat"], "001-apple.png is not of this run"),
        (["--prompt", "cat", "--prompt", "apple", "--seed", 1], "000-cat.png, "),
    ],
)
def test_resume_names_pictures_of_another_run_and_draws_none(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[object],
    named: str,
) -> None:
    folder = tmp_path / "out"
    first = ["--prompt", "cat", "--prompt", "apple"]
    assert generate(model, *first, "--output", folder) == 0
    before = {file: file.read_bytes() for file in folder.iterdir()}
    assert resumed(model, folder, *options) == 2
    said = capsys.readouterr().err
    assert named in said and "try: another --output" in said
    assert {file: file.read_bytes() for file in folder.iterdir()} == before
    assert resumed(model, folder, *first, "--prompt", "a lemon") == 0  # one more at the end
    assert len(list(folder.iterdir())) == 3


def test_a_picture_that_lacks_its_last_bytes_is_cut_off(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.png", tmp_path / "part.png"
    Image.new("RGB", (8, 8), "red").save(whole)
    assert not is_cut_off(whole)
    data = whole.read_bytes()
    for length in range(len(data)):
        part.write_bytes(data[:length])
        assert is_cut_off(part), length


@pytest.mark.parametrize("length", [0, 5, 200, -300, -30])
def test_resume_draws_a_cut_off_picture_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int
) -> None:
    first = ["--prompt", "cat", "--prompt", "apple"]
    assert generate(model, *first, "--output", tmp_path / "out") == 0
    file = tmp_path / "out" / "001-apple.png"
    whole = file.read_bytes()
    file.write_bytes(whole[:length])
    assert resumed(model, tmp_path / "out", *first) == 0
    assert "001-apple.png is cut off, and is drawn again" in capsys.readouterr().err
    assert read_png(file) and np.array_equal(
        pixels(file), np.asarray(Image.open(io.BytesIO(whole)))
    )


def test_resume_clears_what_a_killed_run_left_and_not_what_is_written(
    model: Path, tmp_path: Path
) -> None:
    old, new, other = (
        tmp_path / f".{name}.0123456789abcdef.tmp"
        for name in ("000-cat.png", "001-apple.png", "notes")
    )
    for file in (old, new, other):
        file.write_bytes(b"half")
    for file in (old, other):
        os.utime(file, (1, 1))
    assert resumed(model, tmp_path, "--prompt", "cat", "--prompt", "apple") == 0
    assert not old.exists() and new.exists() and other.exists()
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_two_resumed_runs_draw_into_one_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image that the other has drawn meanwhile stays; one of another seed is refused."""
    draw, seeds = LanternPipeline.draw, iter([0, 1])

    def drawn(pipeline: LanternPipeline, *args: Any, **how: Any) -> Any:
        with monkeypatch.context() as inner:
            inner.setattr(LanternPipeline, "draw", draw)
            assert resumed(model, tmp_path, *words, "--seed", next(seeds)) == 0
        there.update({file: file.read_bytes() for file in tmp_path.iterdir()})
        return draw(pipeline, *args, **how)

    words = ["--prompt", "cat", "--prompt", "apple"]
    there: dict[Path, bytes] = {}
    monkeypatch.setattr(LanternPipeline, "draw", drawn)
    for code in (0, 2):
        assert resumed(model, tmp_path, *words) == code
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == there
        for file in tmp_path.iterdir():
            file.unlink()
    assert "000-cat.png is another image" in capsys.readouterr().err
