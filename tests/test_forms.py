"""Forms of products: the right ones are timed once on a card, the fastest serves and is remembered, and cuBLAS does
wherever a form is wrong, slower or cannot be built, or was timed elsewhere. A stand-in is the card here."""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_hpu.backends import QUANTIZED
from lantern_hpu.backends.base import get_backend
from lantern_hpu.backends.cuda import forms
from lantern_hpu.backends.cuda.backend import CUDABackend, CUDAPlan
from lantern_hpu.backends.cuda.forms import (
    CUBLAS,
    AskedProduct,
    BlockProduct,
    Forms,
    LinearForm,
    products_of,
)
from lantern_hpu.backends.cuda.kernels import checks
from lantern_hpu.backends.cuda.kernels.programs import FORMS
from lantern_hpu.backends.examine import ask
from lantern_hpu.commands.doctor import describe_device
from lantern_hpu.decode.requirements import find_model
from lantern_hpu.files import own_cache
from lantern_hpu.methods.relaxation import Multiplicative
from lantern_hpu.methods.setting import ResolveContext, Setting, resolve
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.transformer import MLPHead, Target
from lantern_hpu.ops.kernels import PLAIN, product
from lantern_hpu.ops.quantized import QuantizedLinear, quantized_layer, replace_layers
from lantern_lab.measure.bench import limits
from tests.tiny import SMALL_TREE, draw, make_engine, request, spec_for, tiny_config, tiny_models

MACHINE = {"card": "H", "driver": "580.1", "torch": "2.11", "triton": "3.6"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LANTERN_HPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Card(forms.Card):
    """A card on which each form takes as long as it is told, in microseconds; cuBLAS 6."""

    def __init__(self, about: dict[str, str] = MACHINE, **us: float) -> None:
        self.about, self.us = about, us
        self.form = CUBLAS  # the last that multiplied
        self.timed: list[str] = []
        self.units = True
        self.spoiled: dict[str, Any] = {}

    def machine(self) -> dict[str, str]:
        return self.about

    def multiplies_matrices(self) -> bool:
        return self.units

    def waiting(self) -> Any:
        return nullcontext()

    def seconds(self, run: Any) -> float:
        self.form = CUBLAS
        run()
        self.timed.append(self.form)
        if self.spoiled.get(self.form) == "graph":
            raise RuntimeError("operation not permitted when stream is capturing")
        return 2e-6 * self.us.get(self.form.partition(" ")[0], 9.0 if self.form != CUBLAS else 6.0)

    def product(self, *given: Any) -> Tensor:
        """The plain one, in the place of Triton's."""
        self.form = given[-1]
        assert len(given) == 10 and FORMS[self.form]
        wrong = self.spoiled.get(self.form)
        if wrong == "compiler":
            raise RuntimeError("PTX assembly aborted\nptxas fatal: no such instruction")
        return product(*given[:-1]) + (0.1 if wrong == "sums" else 0)


def asked(rows: int = 2, name: str = "gate_up") -> AskedProduct:
    blocks = tiny_models()[0].layers
    return AskedProduct(name, [products_of(block)[name] for block in blocks], rows)


def chosen(card: Card, rows: int = 2, name: str = "gate_up") -> tuple[str, str]:
    """The form that serves, and the line that is noted of it."""
    noted: dict[str, str] = {}
    made = Forms(replace(PLAIN, product=card.product), card, noted.__setitem__)
    form = made.choose(asked(rows, name))
    (line,) = noted.values()
    assert "\n" not in line and line.startswith(f"{form}: ")
    return form, line


def kept() -> list[Path]:
    return sorted(own_cache("forms").glob("*.json"))


@pytest.mark.parametrize("name", ["qkv", "out", "gate_up", "down"])
@pytest.mark.parametrize(("rows", "kernel"), [(1, "multiply_add"), (8, "multiply_add"), (9, "dot")])
def test_the_faster_form_serves_and_is_remembered(name: str, rows: int, kernel: str) -> None:
    card = Card(MACHINE, **{kernel: 4.0})
    form, line = chosen(card, rows, name)
    assert FORMS[form].kernel == kernel and rows in FORMS[form].rows
    assert f"{CUBLAS} 6.00 us; {form} 4.00 us" in line
    offered = [other for other, how in FORMS.items() if rows in how.rows]
    assert offered and all(FORMS[other].kernel == kernel for other in offered)
    assert card.timed == [CUBLAS, *offered]
    # Later and in other processes no clock is asked, whatever it would say now
    later = Card(MACHINE, **{kernel: 99.0})
    assert chosen(later, rows, name) == (form, line) and not later.timed
    assert len(kept()) == 1


def test_rows_that_no_form_takes_are_neither_timed_nor_noted() -> None:
    card, noted = Card(), dict[str, str]()
    made = Forms(replace(PLAIN, product=card.product), card, noted.__setitem__)
    assert made.choose(asked(232)) == CUBLAS
    assert not noted and not card.timed and not kept()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("sums", "it does not give what the plain one gives"),
        ("compiler", "RuntimeError: ptxas fatal: no such instruction"),
        ("graph", "RuntimeError: operation not permitted when stream is capturing"),
    ],
)
def test_a_form_that_is_wrong_or_cannot_be_built_is_dropped(how: str, why: str) -> None:
    card = Card(multiply_add=1.0)
    few = [name for name, form in FORMS.items() if 2 in form.rows]
    card.spoiled = {few[0]: how}
    form, line = chosen(card)  # another one serves
    assert form == few[1] and f"{few[0]} is refused: {why}" in line
    card.spoiled = dict.fromkeys(few, how)
    form, line = chosen(card, 3)
    assert form == CUBLAS and line.count(why) == len(few)


def test_where_cublas_cannot_be_timed_it_serves_and_nothing_is_kept() -> None:
    card = Card()
    card.spoiled = {CUBLAS: "graph"}
    form, line = chosen(card)
    assert form == CUBLAS and "nothing was timed: RuntimeError: operation not permitted" in line
    assert not kept()


def test_a_slower_form_is_dropped_and_a_tie_goes_to_cublas() -> None:
    for rows, us in ((2, 7.0), (3, 6.0), (4, 5.95)):
        form, line = chosen(Card(multiply_add=us), rows)
        assert form == CUBLAS and f"multiply_add 2x512 {us:.2f} us" in line


def test_a_kept_form_that_is_wrong_by_now_is_refused_at_start_up() -> None:
    form, _ = chosen(Card(multiply_add=1.0))
    card = Card(multiply_add=1.0)
    card.spoiled = {form: "sums"}
    assert chosen(card) == (
        CUBLAS,
        f"{CUBLAS}: {form} is refused: it does not give what the plain one gives",
    )


@pytest.mark.parametrize("part", MACHINE)
def test_a_choice_of_another_card_driver_or_version_is_not_used(part: str) -> None:
    assert chosen(Card(multiply_add=1.0))[0] != CUBLAS
    other = Card(MACHINE | {part: "other"}, multiply_add=9.0)
    form, line = chosen(other)
    assert form == CUBLAS and other.timed
    assert line.endswith(f"that of {part} {MACHINE[part]} is not used")
    assert len(kept()) == 2
    assert chosen(Card())[0] != CUBLAS  # the first one's is still there


def test_what_differs_in_a_product_is_asked_for_itself() -> None:
    """Rows, format, blocks, and what stands around it."""

    def gate_up(blocks: Any) -> list[BlockProduct]:
        return [products_of(block)["gate_up"] for block in blocks]

    whole = asked()
    wider = Target(tiny_config(dim=128)).layers
    bfloat16, small = tiny_models()[0].layers.bfloat16(), tiny_models()[0].layers
    replace_layers(small, torch.nn.Linear, quantized_layer)
    others = [
        whole._replace(rows=3),
        whole._replace(parts=whole.parts[:1]),
        whole._replace(parts=[part._replace(norm=None) for part in whole.parts]),
        whole._replace(name="down"),
        whole._replace(parts=gate_up(wider)),
        whole._replace(parts=gate_up(bfloat16)),
        *(whole._replace(parts=gate_up(small), dtype=of) for of in (torch.float32, torch.bfloat16)),
    ]
    found = {str(one) for one in (whole, *others)}
    assert len(found) == 1 + len(others) and str(asked()) in found


def test_of_two_processes_the_first_that_writes_decides() -> None:
    card, other = Card(multiply_add=1.0), Card(multiply_add=99.0)
    seconds = card.seconds

    def late(run: Any) -> float:
        if not kept():
            assert chosen(other)[0] == CUBLAS  # another process is done first
        return seconds(run)

    card.seconds = late  # type: ignore[method-assign]
    assert chosen(card)[0] == CUBLAS


def test_where_nothing_can_be_kept_cublas_serves(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen(Card(multiply_add=1.0))
    kept()[0].write_text("{")
    form, line = chosen(Card(multiply_add=1.0))
    assert form == CUBLAS and "no choice is kept: " in line and "cannot read" in line
    (cache / "forms").chmod(0o777)
    form, line = chosen(Card(multiply_add=1.0))
    assert form == CUBLAS and "the cache folder" in line


def test_a_kept_choice_can_be_read_and_edited() -> None:
    """A form is pinned by its name in the file; one that is none is refused, with what serves."""
    chosen(Card(multiply_add=1.0))
    saved = json.loads(kept()[0].read_text())
    assert saved["machine"] == MACHINE and saved["form"] == "multiply_add 2x256"
    assert saved["product"]["name"] == "product norm + gate_up, 192 x 64 float32, 2 layers, 2 rows"
    for form in ("multiply_add 4x256", CUBLAS, "toaster"):
        kept()[0].write_text(json.dumps(saved | {"form": form, "why": "mine"}))
        served = CUBLAS if form == "toaster" else form
        why = "toaster is refused: KeyError: 'toaster'" if form == "toaster" else "mine"
        assert chosen(Card(multiply_add=9.0)) == (served, f"{served}: {why}")


# ------------------------------------------------------------------------------------ in a model


def laid_out(card: Card, modules: Any, graphs: str = "eager", product: bool = True) -> CUDAPlan:
    """The plan of a model whose modules have forms where they can, on the card."""
    kernels = replace(PLAIN, product=card.product) if product else PLAIN
    made = CUDAPlan(get_backend("cpu"), torch.float32, graphs, kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "Card", lambda: card)
        made.lay_out(modules)
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("numbers", ["whole", "int8", "int4", "mixed"])
def test_an_image_drawn_by_forms_is_the_plain_one(bias: bool, numbers: str) -> None:
    """Of a target whose products have biases or not, and a drafter without a norm before its attention."""
    requests = [request("ab", 1, relaxation=Multiplicative(4, lam=3.0)), request("abcd", 2)]
    config = tiny_config(qkv_bias=bias, kv_heads=1)
    spec = spec_for(SMALL_TREE, requests, config=config)
    card, models, others = Card(multiply_add=1.0, dot=1.0), tiny_models(config), tiny_models(config)
    small = {"whole": (), "mixed": (models[0].layers[0], others[0].layers[0])}
    for module in small.get(numbers, (*models, *others)):
        form = "int4" if numbers == "mixed" else numbers
        replace_layers(module, torch.nn.Linear, partial(quantized_layer, form=form))
    want = draw(make_engine(others, spec), requests)
    made = laid_out(card, models)
    got = draw(make_engine(models, spec), requests)
    assert got.tokens.tolist() == want.tokens.tolist() and got.accepted == want.accepted
    # 4 rows of 5 nodes in the target; in the drafter of D + 1 pairs, and of the level below
    rows = {line.split(", ")[-1] for line in made.decided}
    assert {"20 rows", "12 rows", "4 rows"} <= rows
    assert all(not line.startswith(CUBLAS) for line in made.decided.values())
    packed = any("int4 in groups of 64 by float32" in name for name in made.decided)
    assert packed == (numbers in ("int4", "mixed"))


def test_forms_are_chosen_before_a_recording_and_only_read_in_it() -> None:
    """The strict runner tries a step on fake tensors, as a recording would be: what is chosen by then serves."""
    card, models, requests = Card(multiply_add=1.0), tiny_models(), [request("ab", 1)]
    laid_out(card, models)
    engine = make_engine(models, spec_for(SMALL_TREE, requests))
    draw(engine, requests)
    timed, card.form = len(card.timed), CUBLAS
    assert timed
    draw(make_engine(models, spec_for(SMALL_TREE, requests)), requests)
    assert len(card.timed) == timed and card.form != CUBLAS


def target(**sizes: Any) -> Any:
    return Target(tiny_config(**sizes))


def test_what_no_form_fits_is_left_alone() -> None:
    card, behind, odd, plain = Card(), target(sandwich_norms=True), target(), target()
    odd.layers[0].ffn.down = torch.nn.Identity()
    laid_out(card, [behind, odd])
    laid_out(card, [plain], graphs="compile")
    laid_out(card, [plain], product=False)  # as with plain kernels
    assert all(b.fused is None for one in (behind, odd, plain) for b in one.layers)
    heads = [isinstance(one.head.forward, LinearForm) for one in (behind, odd, plain)]
    assert heads == [True, True, False]
    others = torch.nn.ModuleList([torch.nn.Linear(2, 2)])  # of a text encoder, say
    laid_out(card, [SimpleNamespace(layers=others), SimpleNamespace(block=others)])
    assert not isinstance(others[0].forward, LinearForm)


@pytest.mark.parametrize("form", QUANTIZED)
def test_small_matrices_outside_of_blocks_have_forms_too(form: str) -> None:
    """A head of two matrices, what a drafter reads, and lower layers: in a step nothing is widened."""
    models: Any = tiny_models(aux_layers=(0,))
    models[0].head = MLPHead(64, 48, models[0].config.vocab_size).requires_grad_(False)
    for module in models:
        replace_layers(module, torch.nn.Linear, partial(quantized_layer, form=form))
    card, widened = Card(multiply_add=1.0, dot=1.0), list[Any]()
    made = laid_out(card, models)
    requests = [request("ab", 1)]
    engine = make_engine(models, spec_for(SMALL_TREE, requests))
    draw(engine, requests)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(QuantizedLinear, "dequantized", lambda self, _: widened.append(self))
        engine.step_function(engine.state)
    assert not widened
    names = {line.partition(",")[0].removeprefix("product ") for line in made.decided}
    assert {"fc1 + bias", "fc2 + bias", "fc + bias", "linear", "down"} <= names


@pytest.mark.parametrize("images", [1, 2, 4, 8])
@pytest.mark.parametrize("form", QUANTIZED)
def test_what_auto_draws_with_small_matrices_widens_none(images: int, form: str) -> None:
    """Else a step would read and write five bytes a number, two and a half times those of bfloat16."""
    sizes = find_model("emu3.5-image", PartOverrides()).config.target
    defaults = CUDABackend().drafting_defaults(sizes.parameters, form)
    context = ResolveContext(sizes.codes, sizes.tokens, False, defaults=defaults, images=images)
    tree = resolve(Setting(), context).tree
    small = tiny_models()[0].layers
    replace_layers(small, torch.nn.Linear, partial(quantized_layer, form=form))
    parts = [products_of(block)["down"] for block in small]
    asked = AskedProduct("down", parts, 2 * images * tree.size, torch.bfloat16)
    assert tree.size > 1 and asked.offered
    assert not asked._replace(rows=257).offered  # arithmetic takes as long there


def test_cards_without_matrix_units_are_offered_no_dot() -> None:
    card = Card(multiply_add=1.0, dot=1.0)
    card.units = False
    made = Forms(replace(PLAIN, product=card.product), card, lambda name, why: None)
    assert made.choose(asked(9)) == CUBLAS and not card.timed and not kept()
    assert FORMS[made.choose(asked(8))].kernel == "multiply_add"


def test_a_kept_form_of_other_numbers_or_another_text_is_timed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form, _ = chosen(Card(multiply_add=1.0))
    monkeypatch.setitem(FORMS, form, FORMS[form]._replace(warps=1))
    later = Card(multiply_add=99.0)
    assert chosen(later)[0] == CUBLAS and later.timed
    monkeypatch.setattr(checks, "text_digest", lambda *names: "another")
    assert chosen(Card(multiply_add=1.0))[0] == form
    assert len(kept()) == 3


def test_forms_serve_few_rows_and_no_gradients() -> None:
    card, target = Card(multiply_add=1.0), tiny_models()[0]
    laid_out(card, [target])
    block: Any = target.layers[0]
    assert not block.fused.serves(torch.zeros(1, 1, 64)) and not card.timed
    with torch.no_grad():
        assert block.fused.serves(torch.zeros(1, 1, 64))
        assert not block.fused.serves(torch.zeros(1, 232, 64))


# ------------------------------------------------------------------------------------ said where


def test_reports_doctor_and_bench_name_what_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    card, models, requests = Card(multiply_add=1.0), tiny_models(), [request("ab", 1)]
    made = laid_out(card, models)
    draw(make_engine(models, spec_for(SMALL_TREE, requests)), requests)
    chosen(Card(MACHINE | {"driver": "570.2"}))
    name = "product norm + gate_up, 192 x 64 float32, 2 layers, 8 rows"
    # A report has `decided`; notes of a benchmark are printed below its tables
    model = SimpleNamespace(notes=[])
    pipeline: Any = SimpleNamespace(fit=made, model=model, backend=get_backend("cpu"))
    wanted: Any = SimpleNamespace(interleave=False)
    lines = [*limits(pipeline, wanted)]
    monkeypatch.setattr(forms, "Card", lambda: card)
    backend = CUDABackend()
    monkeypatch.setattr(backend, "available", lambda: (True, "H"))
    shown = dict(describe_device(ask(backend, "")))["products"].split("\n")
    assert shown.pop() == "1 of other cards, drivers or versions, not used"
    told = f"{name}: multiply_add 2x256: {CUBLAS} 6.00 us; multiply_add 2x256 1.00 us; "
    assert made.decided[name].startswith(told.removeprefix(f"{name}: "))
    for said in (lines, shown):
        assert any(line.startswith(told) for line in said)
        assert any(
            "product down, 64 x 96 float32, 1 layers, " in line for line in said
        )  # the drafter's


def test_the_driver_is_named_as_it_names_itself(tmp_path: Path) -> None:
    file = tmp_path / "version"
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    file.write_text(f"{line}\nGCC version:  gcc version 12.3.0\n")
    assert forms.driver_version(file) == "580.95.05"


def test_a_card_waits_inside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = ["error"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with suppress(ValueError), forms.Card().waiting():
        modes.append(modes[-1] + " inside")
        raise ValueError
    assert modes == ["error", "default", "default inside", "error"]


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
def test_a_run_is_timed_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's own clock, which gives milliseconds; some 20 of them for a product."""
    from triton import testing

    streams = ["main"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)

    def clock(run: Any, rep: int, return_mode: str) -> float:
        streams.append("capture")  # which torch leaves only where the capture ends well
        run()
        assert 10 * rep == 20 and return_mode == "median"
        return 0.25

    monkeypatch.setattr(testing, "do_bench_cudagraph", clock)
    runs: list[int] = []
    assert forms.Card().seconds(lambda: runs.append(1)) == 0.00025 and runs == [1]
    with pytest.raises(ZeroDivisionError):
        forms.Card().seconds(lambda: 1 // 0)
    assert streams == ["main", *["capture", "main"] * 2]
