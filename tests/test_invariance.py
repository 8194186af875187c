"""An image does not depend on its batch, its slot, or the threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lantern_hpu.backends.cpu import native
from lantern_hpu.core import Request
from lantern_hpu.decode.engine import Engine
from lantern_hpu.pipeline import LanternPipeline
from tests.marks import mostly_slow

needs_library = pytest.mark.skipif(not native.isa(), reason=native.open_library()[1])


@needs_library
@pytest.mark.parametrize("threads", mostly_slow([1, 2], 2))
def test_batches_of_any_size_draw_the_same_images(model: Path, threads: int) -> None:
    """Of `ar`, a relaxed tree and a window; alone by one thread, together by one or two."""
    drawn: dict[int, list[list[list[int]]]] = {}
    before = torch.get_num_threads()
    for size in (1, 3):
        taken = 1 if size == 1 else threads
        pipeline = LanternPipeline.from_pretrained(str(model), device="cpu", threads=taken)
        drawn[size] = [
            pipeline(["a red cat"] * 4, method=method, batch_size=size).tokens.tolist()
            for method in ("ar", "lantern++@broad_7", "scd@scd:4")
        ]
    torch.set_num_threads(before)
    assert drawn[3] == drawn[1]


def cache_of(engine: Engine, slot: int) -> list[torch.Tensor]:
    """The committed keys and values of a slot's rows, without those that are still to be moved."""
    config, spec = engine.target.config, engine.spec
    end = config.prefix + config.tokens - 2 * spec.max_step_tokens
    rows = [slot, slot + spec.images] if spec.guidance else [slot]
    return [
        part.cpu()[rows, :end] for layer in engine.state.kv_cache.layers for part in layer.read()
    ]


@needs_library
@pytest.mark.parametrize("method", ["ar", "scd@2", "lantern++@broad_7"])
def test_bits_of_an_image_do_not_depend_on_its_batch(
    pipeline: LanternPipeline, method: str
) -> None:
    """Tokens, pixels, and every key and value in the cache of any layer; in open batches slots are taken again."""
    setting = pipeline.resolve(method)
    requests = [
        Request("a red cat", seed, pipeline.model.sampling, setting.relaxation) for seed in range(4)
    ]
    alone: list[tuple[list[int], bytes, list[torch.Tensor]]] = []
    for size, is_open in ((1, False), (2, False), (2, True)):
        spec = replace(pipeline.spec(requests, setting.tree, size), open=is_open)
        engine = pipeline.engines.get(spec)
        pipeline.warm_up(engine, requests[0])
        step = len(requests) if is_open else size
        for first in range(0, len(requests), step):
            for index, done in pipeline.stream(engine, requests[first : first + step]):
                picture = pipeline.picture(done)
                assert picture is not None
                # A closed batch fills its slots in order
                cache = [] if is_open else cache_of(engine, index)
                if size == 1:
                    alone.append((done.token_ids.tolist(), picture.tobytes(), cache))
                tokens, pixels, bits = alone[first + index]
                assert done.token_ids.tolist() == tokens and picture.tobytes() == pixels
                assert all(map(torch.equal, cache, bits))
