"""The Python API, as a user of diffusers types it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import lantern_hpu
from lantern_hpu import GenerationResult, LanternPipeline, Multiplicative, Request
from lantern_hpu.core import Event
from lantern_hpu.errors import DeviceError, OptionError, OutputError
from lantern_hpu.methods.setting import Setting
from lantern_hpu.results.images import CAPTION, grid
from lantern_hpu.results.progress import Bar, ProgressBar
from tests.marks import mostly_slow


def seeds(result: GenerationResult) -> list[int]:
    return [record.seed for record in result.records]


def test_every_public_name_is_there() -> None:
    for name in lantern_hpu.__all__:
        assert getattr(lantern_hpu, name) is not None
    assert set(lantern_hpu.__all__) <= set(dir(lantern_hpu))
    with pytest.raises(AttributeError, match="Lantern"):
        getattr(lantern_hpu, "Lantern")  # noqa: B009


def test_images_of_each_prompt_follow_each_other(pipeline: LanternPipeline) -> None:
    result = pipeline(["red cat", "apple"], num_images_per_prompt=2, seed=5, method="scd")
    assert [record.prompt for record in result.records] == ["red cat", "red cat", "apple", "apple"]
    assert seeds(result) == [5, 6, 7, 8] and result.images[0].size == (8, 8)
    again = pipeline("apple", seed=7, method="scd")
    assert np.array_equal(again.tokens[0], result.tokens[2])


def test_a_callback_follows_the_run(pipeline: LanternPipeline) -> None:
    calls: list[tuple[int, int]] = []

    def follow(pipe: LanternPipeline, step: int, tokens: int, kwargs: dict[str, Any]) -> None:
        assert pipe is pipeline and kwargs["event"].steps == step
        calls.append((step, tokens))

    result = pipeline(["cat", "apple"], callback_on_step_end=follow)
    assert calls == sorted(calls) and calls[-1][1] == result.tokens.size


def test_generators_and_lists_give_seeds(pipeline: LanternPipeline) -> None:
    one = torch.Generator().manual_seed(7)
    assert seeds(pipeline("cat", num_images_per_prompt=2, generator=one)) == [7, 8]
    several = [torch.Generator().manual_seed(seed) for seed in (3, 1)]
    assert seeds(pipeline(["cat", "apple"], generator=several)) == [3, 1]
    assert seeds(pipeline(["cat", "apple"], seed=[5, 9])) == [5, 9]
    assert seeds(pipeline("cat", seed=np.int64(3))) == [3]


@pytest.mark.parametrize(
    ("argument", "field", "value"),
    [
        ("guidance_scale", "cfg_scale", 4.0),
        ("temperature", "temperature", 0.5),
        ("top_k", "top_k", 9),
    ],
)
def test_a_sampling_argument_changes_itself_alone(
    pipeline: LanternPipeline, argument: str, field: str, value: float
) -> None:
    usual = pipeline("cat").settings[0]["sampling"]
    changed = pipeline("cat", **{argument: value}).settings[0]["sampling"]  # type: ignore[arg-type]
    assert changed == usual | {field: value} != usual


def test_methods_relaxations_and_windows_by_name(pipeline: LanternPipeline) -> None:
    written = pipeline("cat", method="lantern++:lambda=5:k=4")
    typed = pipeline("cat", method=Setting("lantern++", Multiplicative(4, lam=5.0)))
    assert written.config["tree"] == typed.config["tree"]
    assert np.array_equal(written.tokens, typed.tokens)
    assert pipeline("cat", method="scd@4").config["tree"].startswith("scd:4")
    assert pipeline("cat", method="eagle@flat_4").config["tree"] == "flat_4"


@pytest.mark.parametrize("kind", ["np", "pt", "tokens"])
def test_output_types(pipeline: LanternPipeline, kind: Any) -> None:
    pictures = pipeline(["cat", "apple"])
    result = pipeline(["cat", "apple"], output_type=kind)
    pixels = np.stack([np.asarray(image) for image in pictures.images])
    if kind == "tokens":
        assert np.array_equal(result.images, pictures.tokens) and not result.pictures
    elif kind == "np":
        assert result.images.dtype == np.float32 and result.images.shape == (2, 8, 8, 3)
        assert np.array_equal(np.rint(result.images * 255), pixels)
    else:
        assert result.images.shape == (2, 3, 8, 8) and result.images.dtype == torch.float32
        assert np.array_equal(np.rint(result.images.numpy() * 255), pixels.transpose(0, 3, 1, 2))


def test_a_sheet_of_the_images(pipeline: LanternPipeline) -> None:
    result = pipeline("cat", num_images_per_prompt=3)
    assert result.grid(cols=2).size == (2 * 12 + 4, 2 * 12 + 4)
    assert result.grid(cols=3, scale=2).size == (3 * 20 + 4, 20 + 4)
    assert result.grid().size == (2 * 12 + 4, 2 * 12 + 4)  # as square as it can be
    captioned = grid(result.images, captions=["a cat", "b", "c"])
    for count, together, columns in ((16, 1, 4), (10, 2, 4), (16, 2, 4), (6, 6, 6), (1, 1, 1)):
        many = grid([result.images[0]] * count, gap=0, together=together)
        assert many.width == columns * result.images[0].width
    assert captioned.size == (2 * 12 + 4, 2 * (12 + CAPTION) + 4)


def test_the_device_and_the_number_format_are_torch_types(model: Path) -> None:
    pipe = LanternPipeline.from_pretrained(
        str(model), device=torch.device("cpu"), torch_dtype=torch.bfloat16
    )
    assert pipe.model.target.dtype == torch.bfloat16
    with pytest.raises(OptionError, match="not together"):
        LanternPipeline.from_pretrained(str(model), torch_dtype=torch.float32, dtype="bfloat16")


def test_a_pipeline_moves_by_loading_anew(model: Path) -> None:
    pipe = LanternPipeline.from_pretrained(str(model))
    before, weights = pipe("cat").tokens, pipe.model
    assert pipe.to("cpu") is pipe and pipe.model is weights
    pipe.to(torch.bfloat16)
    assert pipe.model.target.dtype == torch.bfloat16 and pipe.model is not weights
    pipe.to("cpu", torch.float32)
    assert np.array_equal(pipe("cat").tokens, before)
    with pytest.raises(DeviceError):
        pipe.to("cuda")
    assert np.array_equal(pipe("cat").tokens, before)  # as it was


def test_threads_wait_for_each_other(pipeline: LanternPipeline) -> None:
    alone = [pipeline("cat", seed=seed, method="scd").tokens for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(pipeline, "cat", seed=seed, method="scd") for seed in range(6)]
    for expected, call in zip(alone, calls, strict=True):
        assert np.array_equal(expected, call.result().tokens)


def test_calls_from_an_event_loop(pipeline: LanternPipeline) -> None:
    async def draw() -> list[GenerationResult]:
        return await asyncio.gather(*(asyncio.to_thread(pipeline, "cat", seed=s) for s in (1, 2)))

    assert [seeds(result) for result in asyncio.run(draw())] == [[1], [2]]


def test_the_progress_bar_is_the_users(
    pipeline: LanternPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline("cat")
    assert capsys.readouterr().err == ""  # no terminal
    pipeline.set_progress_bar_config(disable=False)
    pipeline("cat")
    assert "row" in capsys.readouterr().err
    pipeline.set_progress_bar_config(disable=True)
    pipeline("cat")
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------------ reflexes of diffusers


def test_a_pipeline_says_what_and_where_it_is(pipeline: LanternPipeline) -> None:
    assert pipeline.device == torch.device("cpu") and pipeline.dtype == torch.float32
    assert pipeline.components["target"] is pipeline.model.target
    assert pipeline.components["drafter"] is not None
    text = repr(pipeline)
    assert pipeline.model.source in text and "device=cpu, dtype=float32" in text
    assert f"method={pipeline.resolve('auto')}" in text


def test_a_result_is_a_tuple_too(pipeline: LanternPipeline) -> None:
    result = pipeline("cat", return_dict=False)
    (images,) = result
    assert images == result[0] == result.images
    with pytest.raises(IndexError):
        result[1]


def test_a_second_argument_by_place_is_answered_with_names(pipeline: LanternPipeline) -> None:
    with pytest.raises(OptionError, match="'bad' by its name") as caught:
        pipeline("cat", "bad")  # type: ignore[call-arg]
    assert caught.value.hint.startswith("negative_prompt=...")
    with pytest.raises(OptionError, match="'cuda' by its name") as caught:
        LanternPipeline.from_single_file("builtin", "cuda")  # type: ignore[call-arg]
    assert caught.value.hint.startswith("device=...")


def test_an_attribute_of_another_library_points_at_the_page(pipeline: LanternPipeline) -> None:
    with pytest.raises(AttributeError, match="coming-from"):
        pipeline.enable_model_cpu_offload  # noqa: B018
    assert not hasattr(pipeline, "scheduler")


METHODS = ("ar", "scd@3", "eagle@chain", "lantern:delta-0.2@dynamic:2x1x4")


@pytest.mark.parametrize("method", mostly_slow(METHODS, "ar", "scd@3"))
def test_a_call_within_a_callback_draws_the_same_image(
    pipeline: LanternPipeline, method: str
) -> None:
    """Whatever is drawn inside, and a callback in that one: each image is the one drawn alone."""
    prompts, batch = ["cat", "apple", "red cat"], dict[str, Any](batch_size=2)
    alone = [pipeline(prompts, seed=seed, method=method, **batch).tokens for seed in range(3)]
    inside: dict[int, NDArray[np.int64]] = {}

    def draw(depth: int) -> NDArray[np.int64]:
        def callback(pipe: LanternPipeline, *_: Any) -> None:
            if depth < 2 and depth + 1 not in inside:
                inside[depth + 1] = draw(depth + 1)

        how: dict[str, Any] = {"callback_on_step_end": callback, "method": method, **batch}
        return pipeline(prompts, seed=depth, **how).tokens

    inside[0] = draw(0)
    assert all(np.array_equal(inside[seed], alone[seed]) for seed in range(3))
    assert not any(engine.pins for engine in pipeline.engines.engines.values())


@pytest.mark.parametrize("method", mostly_slow(METHODS, "ar", "scd@3"))
def test_a_call_between_the_images_of_a_stream_draws_the_same(
    pipeline: LanternPipeline, method: str
) -> None:
    requests = [Request("cat", seed, pipeline.model.sampling) for seed in range(5)]
    setting = pipeline.resolve(method)
    alone = pipeline.draw(requests, setting, 2).tokens
    spec = replace(pipeline.spec(requests, setting.tree, 2), open=True)
    stream = pipeline.stream(pipeline.engines.get(spec), requests)
    found = dict([next(stream)])  # the image beside it goes on
    others = [replace(request, prompt="apple") for request in requests]
    inner = pipeline.draw(others, setting, 2).tokens
    found |= dict(stream)
    assert np.array_equal([found[n].token_ids for n in range(5)], alone)
    assert np.array_equal(inner, pipeline.draw(others, setting, 2).tokens)


def test_an_engine_in_use_and_its_model_are_refused(pipeline: LanternPipeline) -> None:
    requests = [Request("cat", seed, pipeline.model.sampling) for seed in range(2)]
    setting = pipeline.resolve("ar")
    engine = pipeline.engines.get(replace(pipeline.spec(requests, setting.tree, 1), open=True))
    stream = pipeline.stream(engine, requests)
    first = next(stream)
    with pytest.raises(OptionError, match="the engine is in use"):
        next(pipeline.stream(engine, requests))
    with pytest.raises(OptionError, match="cannot be loaded again"):
        pipeline.to(dtype="bfloat16")
    found = dict([first, *stream])
    alone = pipeline.draw(requests, setting).tokens
    assert np.array_equal([found[n].token_ids for n in range(2)], alone)


def test_an_interrupt_ends_the_run_whose_callback_asked(pipeline: LanternPipeline) -> None:
    def stop(pipe: LanternPipeline, *_: Any) -> None:
        pipe._interrupt = True

    def outer(pipe: LanternPipeline, *_: Any) -> None:
        assert len(pipe(["cat"] * 3, batch_size=1, callback_on_step_end=stop).images) < 3

    def stops_first(pipe: LanternPipeline, *_: Any) -> None:
        stop(pipe)
        pipe("apple")

    how: dict[str, Any] = {"prompt": ["cat"] * 3, "batch_size": 1}
    assert len(pipeline(**how, callback_on_step_end=outer).images) == 3
    assert len(pipeline(**how, callback_on_step_end=stops_first).images) < 3


def test_what_was_finished_before_an_interrupt_is_kept(pipeline: LanternPipeline) -> None:
    shown: list[Any] = []

    def stop(pipe: LanternPipeline, step: int, tokens: int, more: dict[str, Any]) -> None:
        shown.extend(more["event"].preview())
        pipe._interrupt = tokens > pipe.model.target.config.tokens  # within the second image

    result = pipeline(["cat", "apple", "red cat"], batch_size=1, callback_on_step_end=stop)
    assert [record.prompt for record in result.records] == ["cat"] and len(result.images) == 1
    assert len(result.tokens) == 1 and shown
    assert result.images[0].tobytes() == pipeline("cat").images[0].tobytes()
    assert len(pipeline(["cat"] * 3, batch_size=1).images) == 3  # the next call is whole


def test_a_model_of_one_size_takes_that_size(pipeline: LanternPipeline) -> None:
    height, width = pipeline.model.config.image_size
    asked = pipeline("cat", height=height, width=width)
    assert asked.images[0].tobytes() == pipeline("cat").images[0].tobytes()
    with pytest.raises(OptionError, match=f"generates one size, {width} x {height} pixels"):
        pipeline("cat", height=2 * height, width=width)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "a device": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("layout", mostly_slow(["auto", "plain"], "auto"))
@pytest.mark.parametrize("around", mostly_slow(SURROUNDINGS, "a device", "bfloat16"))
def test_what_the_program_around_has_set_for_torch_changes_no_image(
    model: Path, around: str, layout: str
) -> None:
    """Loaded inside and called outside, the other way round, and both; a callback has what its program has set."""

    def load() -> LanternPipeline:
        return LanternPipeline.from_pretrained(str(model), device="cpu", layout=layout)

    def draw(pipe: LanternPipeline) -> list[NDArray[Any]]:
        results = [pipe("cat", seed=3, method=method, output_type="np") for method in METHODS[1:3]]
        return [*(one.tokens for one in results), *(one.images for one in results)]

    want = draw(load())
    with SURROUNDINGS[around]():
        before = torch.empty(1)
        inside = load()
        inside_both = draw(inside)
        made: list[torch.Tensor] = []
        inside("cat", callback_on_step_end=lambda *_: made.append(torch.empty(1)))
        assert made and all((x.dtype, x.device) == (before.dtype, before.device) for x in made)
    outside = load()
    with SURROUNDINGS[around]():
        called = draw(outside)
    for found in (inside_both, draw(inside), called, draw(outside)):
        assert all(map(np.array_equal, found, want))


def test_a_pipeline_is_written_as_a_folder(pipeline: LanternPipeline, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path / "copy")
    copy = LanternPipeline.from_pretrained(str(tmp_path / "copy"))
    assert np.array_equal(copy("cat").tokens, pipeline("cat").tokens)
    with pytest.raises(OutputError, match="exists"):
        pipeline.save_pretrained(tmp_path / "copy")


def test_a_log_gets_a_line_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(20, desc="tuning") as shown:
        for _ in range(20):
            shown.set_postfix_str("row 3 of 16")  # as often as a terminal shows it
            shown.update()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and lines[-1] == "tuning: 20 of 20 parts, row 3 of 16"
    with closing(Bar()) as bar:
        for rows in range(0, 101, 2):
            bar(Event(rows, 100, 1, 2.0, rows, rows, list))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and lines[0] == "drawing: 0 of 100 rows, 2.00 tokens a step"
    assert lines[-1].startswith("drawing: 100 of 100")
