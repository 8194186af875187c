"""What a step launches on CUDA is held: each kernel takes a card about as long as a layer's norm."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lantern_hpu.backends.cuda.forms import CUBLAS, Card, Forms, install
from lantern_hpu.decode.accelerators import Rates, accelerators
from lantern_hpu.decode.requirements import find_model
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.transformer import Drafter
from lantern_hpu.tree import DraftTree, load_tree
from lantern_lab.measure.floors import StepPasses, launches, product_seconds, projected
from lantern_lab.measure.launches import Launches, count_step, engine_of, model_config
from tests.marks import mostly_slow

ROOT, ROOT_ALONE = Path(__file__).parent.parent, DraftTree.root_only()
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")

# Of the embedded model, of 8 layers, and of its widening to 36; one image
MOST = {
    "ar": (77, 301),
    "scd@16": (103, 327),
    "eagle@chain": (187, 412),
    "eagle@mc_sim_7b_63": (203, 429),
}


@pytest.mark.parametrize("method", mostly_slow(MOST, "scd@16", "eagle@chain"))
def test_step_launches_no_more_than_this(method: str) -> None:
    small = find_model("builtin", PartOverrides()).config
    most = dict(zip((small, model_config(None)), MOST[method], strict=True))
    for config, limit in most.items():
        found = count_step(engine_of(config, method))
        assert found.total() <= limit, found


# Of one guided image of sizes that are published
PUBLISHED = {
    ("llamagen-t2i-256", "ar"): 301,
    ("janus-pro-7b", "ar"): 258,
    ("janus-pro-7b", "scd@16"): 284,
    ("anole-7b", "scd@16"): 295,
    ("emu3-gen", "ar"): 278,
    ("emu3-gen", "scd@16"): 391,
    ("emu3.5-image", "ar"): 537,
    ("glm-image", "ar"): 333,
    ("glm-image", "scd@16"): 399,
}


@pytest.mark.parametrize(
    ("model", "method"),
    mostly_slow(
        [*((None, method) for method in MOST), *PUBLISHED],
        (None, "scd@16"),
        ("emu3-gen", "scd@16"),
        *(case for case in PUBLISHED if case[1] == "ar"),
    ),
)
def test_step_of_a_published_model_launches_as_many_as_projected(
    model: str | None, method: str
) -> None:
    """Eight kernels a layer, whatever norms and groups its heads have; the projection needs no Triton."""
    config = model_config(model)
    engine = engine_of(config, method)
    found = count_step(engine)
    about = launches(config.target, StepPasses.of(engine.spec.tree))
    assert about == pytest.approx(found.total(), rel=0.05)
    assert model is None or found.total() <= PUBLISHED[model, method], found


def test_projection_is_about_what_was_measured() -> None:
    """With the launches of the steps that were measured on an H200, which were more, by its report and its profile."""
    card, large = accelerators()["h200"], model_config(None)
    assert card.launch is not None and card.copied is not None
    rates = Rates(card.copied, card.rate)
    report = json.loads((ROOT / "benchmarks" / "results" / "xl-h200.json").read_text())
    steps = {f"{r['method']}@{r['tree']}": r["step_alone_ms"] for r in report["rows"]}
    counted = {"ar@root": 529, "scd@scd:8": 574, "eagle@chain": 801}
    for name, count in counted.items():
        method, _, tree = name.partition("@")
        passes = StepPasses.of(ROOT_ALONE if method == "ar" else load_tree(tree))
        fewer = count - launches(large.target, passes)
        step = projected(large, passes, 2, rates, card.launch) + fewer * card.launch
        assert 1000 * step == pytest.approx(steps[name], rel=0.1)
    # Products alone, in a graph: milliseconds over two rows, at XL's sizes and at those of a Llama of 7B
    for measured, layers, shapes in (
        (0.942, 36, ((3840, 1280), (1280, 1280), (6912, 1280), (1280, 3456))),
        (3.667, 32, ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008))),
    ):
        matrices = [torch.empty(shape, device="meta") for shape in shapes] * layers
        assert 1000 * product_seconds(matrices, rates) == pytest.approx(measured, rel=0.15)


def test_projection_of_8_bits_reads_a_byte_a_number() -> None:
    """Of large products half the time, of small ones what a launch takes."""
    card = accelerators()["h200"]
    assert card.launch is not None and card.copied is not None
    for name, share in (("janus-pro-7b", 0.58), ("emu3.5-image", 0.54), (None, 1.0)):
        config, passes = model_config(name), StepPasses.of(ROOT_ALONE)
        whole, small = (
            projected(config, passes, 2, Rates(card.copied, card.rate, 2, size), card.launch)
            for size in (None, 1)
        )
        assert small == pytest.approx(share * whole, rel=0.05)


def test_what_an_operator_launches() -> None:
    x = torch.ones(4, 6, device="meta")
    whole = torch.zeros(3, dtype=torch.int32, device="meta")

    def count(function: object) -> int:
        launches = Launches()
        with launches.counting():
            assert callable(function)
            function()
        return launches.count.total()

    views = {0: lambda: x.view(24)[3:].unflatten(0, (3, 7)).expand(2, -1, -1)}
    kernels = {1: lambda: x + x, 2: lambda: x[whole], 3: lambda: (x.T.flatten() + 1).mul_(2)}
    for number, function in (views | kernels).items():
        assert count(function) == number
    assert count(lambda: x[:0] + 1) == 0  # nothing to compute


def test_own_kernel_counts_as_what_it_launches() -> None:
    """Of many queries, attention that is shared out among programs has a second one."""
    from lantern_hpu.backends.cuda.kernels.attention import triton_attention

    def attend(slots: int, tokens: int) -> dict[str, int]:
        def part(tokens: int) -> Tensor:
            return torch.zeros(2, 4, tokens, 64, dtype=torch.bfloat16, device="meta")

        mask, launches = part(tokens)[:, :1, :, :1].expand(-1, -1, -1, slots), Launches()
        with torch.no_grad(), launches.counting():
            triton_attention(part(tokens), part(slots), part(slots), mask.contiguous())
        return {name: n for name, n in launches.count.items() if name.endswith("_kernel")}

    assert attend(64, 100) == attend(4096, 17) == {"attention_kernel": 1}
    assert attend(4096, 100) == {"attention_kernel": 1, "combine_kernel": 1}


# With each product of a block in a form of its own: qkv, attention, out, gate_up and down are a layer's five
FORMED = {"ar": (53, 193), "scd@16": (79, 219), "eagle@chain": (146, 287)}


@pytest.mark.parametrize("method", mostly_slow(FORMED, "scd@16"))
def test_layer_whose_products_have_forms_launches_five_kernels(method: str) -> None:
    small, large = find_model("builtin", PartOverrides()).config, model_config(None)
    for config, limit in zip((small, large), FORMED[method], strict=True):
        engine = engine_of(config, method)
        made = Forms(engine.target.kernels, Card(), lambda name, why: None)
        made.choose = lambda asked: (asked.offered or [CUBLAS])[0]  # type: ignore[method-assign]
        drafters = [m for m in engine.step_function.modules() if isinstance(m, Drafter)]
        install([engine.target, *drafters], made)
        found = count_step(engine)
        assert found.total() <= limit, found
        assert found["product_kernel"] >= 4 * config.target.layers
