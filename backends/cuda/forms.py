"""Which form of each product serves on a card: the right ones are timed there once, and the fastest is kept on disk.

A choice is for a card, its driver and versions, and the sizes of a product; it is made as an engine warms up, and from
then on read. So the bits of an image do not depend on when something was timed. cuBLAS serves where a form cannot be
built, is wrong or is not faster, and where the choice cannot be kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.backends.base import Candidate, dtype_name
from lantern_hpu.backends.cuda.kernels import checks
from lantern_hpu.backends.cuda.kernels.programs import FORMS, has_matrix_units
from lantern_hpu.errors import LanternError, OutputError
from lantern_hpu.files import own_cache, reading, write_file
from lantern_hpu.ops.kernels import Kernels, product
from lantern_hpu.ops.quantized import QuantizedLinear, dequantized, matrix_layers

CUBLAS = "cublas"
GAIN = 0.97  # of cuBLAS's time: a form that takes more is not faster, as far as can be told
TIMED_MS = 2  # of each of ten replays
EDGE = 512  # columns at an end of a matrix that are compared
TEXTS = ("products", "programs")  # files of the kernel that a choice is of


class Card:
    """What a choice needs of the current CUDA device."""

    def machine(self) -> dict[str, str]:
        """It, and all versions that its kernels depend on."""
        import triton

        about = {"card": torch.cuda.get_device_name(), "driver": driver_version()}
        return about | {"torch": torch.__version__, "triton": triton.__version__}

    def multiplies_matrices(self) -> bool:
        """Whether the forms by `tl.dot` are worth a try; without units they are many times slower than cuBLAS."""
        return has_matrix_units(torch.device("cuda"))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the host may wait for the card, which is an error in a run before a capture."""
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def seconds(self, run: Callable[[], object]) -> float:
        """Of a run within a graph. What fails in its capture may leave another stream the current one."""
        from triton.testing import do_bench_cudagraph

        stream = torch.cuda.current_stream()
        try:
            return float(do_bench_cudagraph(run, rep=TIMED_MS, return_mode="median")) / 1000
        finally:
            torch.cuda.set_stream(stream)


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The driver's own number; where the system does not say, that of its interface."""
    with suppress(OSError):
        if found := re.search(r"\d+\.\d+[.\d]*", file.read_text().partition("\n")[0]):
            return found[0]
    return str(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------ products


class BlockProduct(NamedTuple):
    """A linear layer, with what stands around it in a block."""

    linear: Any
    norm: Any = None  # the RMSNorm before it
    gated: bool = False  # SwiGLU follows
    adds: bool = False  # its result is added to a residual

    def arguments(self, x: Tensor, residual: Tensor | None) -> tuple[Any, ...]:
        """Those of `kernels.product`."""
        norm, eps = (self.norm.weight, self.norm.eps) if self.norm else (None, 0.0)
        linear = self.linear
        small = getattr(linear, "scale", None), getattr(linear, "zero", None)
        return x, linear.weight, linear.bias, norm, residual, eps, self.gated, *small


def products_of(block: Any) -> dict[str, BlockProduct]:
    """The products of a block; a norm that is not there is an `nn.Identity`."""
    norms = (block.attention_norm, block.ffn_norm)
    before, between = (None if isinstance(norm, nn.Identity) else norm for norm in norms)
    return {
        "qkv": BlockProduct(block.attention.qkv, before),
        "out": BlockProduct(block.attention.out, adds=True),
        "gate_up": BlockProduct(block.ffn.gate_up, between, gated=True),
        "down": BlockProduct(block.ffn.down, adds=True),
    }


class AskedProduct(NamedTuple):
    """A product whose form is asked for: that of all blocks of a module, with so many rows.

    Attributes:
        dtype: of the rows, where the matrices have 8 or 4 bits.
    """

    name: str
    parts: Sequence[BlockProduct]
    rows: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        """All that a choice may depend on, but for the machine."""
        (linear, norm, *_) = self.parts[0]
        layers = len(self.parts)
        around = ["norm"] * (norm is not None) + [self.name] + ["bias"] * (linear.bias is not None)
        numbers = dtype_name(linear.weight.dtype)
        if self.small:
            groups = f" in groups of {linear.group}" if linear.group else ""
            numbers = f"int{linear.bits}{groups} by {dtype_name(self.dtype)}"
        sizes = f"{linear.out_features} x {linear.in_features} {numbers}"
        return f"product {' + '.join(around)}, {sizes}, {layers} layers, {self.rows} rows"

    @property
    def small(self) -> bool:
        return isinstance(self.parts[0].linear, QuantizedLinear)

    @property
    def offered(self) -> list[str]:
        """The forms for so many rows."""
        return [
            name
            for name, form in FORMS.items()
            if self.rows in (form.small_rows if self.small else form.rows)
        ]

    def inputs(self) -> tuple[Tensor, Tensor | None]:
        """Random rows [rows, K], and what their product [rows, N] is added to, if it is."""
        (linear, _, _, adds) = self.parts[0]
        like = linear.weight
        dtype = self.dtype if self.small else like.dtype
        seeded = torch.Generator(like.device).manual_seed(0)

        def some(width: int) -> Tensor:
            shape = (self.rows, width)
            return torch.randn(shape, generator=seeded, device=like.device, dtype=dtype)

        return some(linear.in_features), some(linear.out_features) if adds else None


# ------------------------------------------------------------------------------------ choices


Choice = tuple[str, str]  # the form that serves a product, and why


class ProductCheck:
    """Holds forms of a product to the processor's plain twin, over the columns at both ends of the first matrix."""

    def __init__(self, asked: AskedProduct, multiply: Callable[..., Tensor]) -> None:
        self.asked, self.multiply = asked, multiply

    @cached_property
    def case(self) -> tuple[tuple[Any, ...], Tensor, Tensor]:
        """Arguments of `kernels.product`, the columns that are compared, and what they are."""
        given = self.asked.parts[0].arguments(*self.asked.inputs())
        x, weight, bias, norm, residual, eps, gated, *small = given
        width = len(weight) // (1 + gated)
        end = torch.arange(min(width, EDGE), device=x.device)
        columns = torch.cat([end, width - 1 - end]).unique()
        rows = torch.cat([columns, width + columns]) if gated else columns

        def part(values: Tensor | None, index: Any = rows) -> Tensor | None:
            return None if values is None else values[index].cpu()

        around = part(bias), part(norm, ...), part(residual, (..., columns)), eps, gated
        wanted = product(x.cpu(), weight[rows].cpu(), *around, *map(part, small))
        return given, columns, wanted

    def fault(self, form: str) -> str:
        """Why it is refused: it gives something else than the twin. Nothing, if it is right."""
        if form == CUBLAS:
            return ""
        given, columns, wanted = self.case
        largest = wanted.abs().max().clamp(min=torch.finfo(torch.float16).tiny)  # of any matrix

        def run() -> Tensor:
            return self.multiply(form, *given)[..., columns] / largest.to(columns.device)

        slack = checks.tolerance(wanted.dtype)
        return checks.fault(Candidate(lambda: run, [((), [wanted / largest])], slack))


class Forms:
    """Chooses forms on a card, and remembers them; `note` is given each product's name and its choice in a line."""

    def __init__(self, kernels: Kernels, card: Card, note: Callable[[str, str], object]) -> None:
        self.kernels = kernels
        self.card = card
        self.note = note

    @cached_property
    def machine(self) -> dict[str, str]:
        return self.card.machine()

    def multiply(self, form: str, *given: Any) -> Tensor:
        """The product in a form; `given` are the arguments of `kernels.product`."""
        x, weight, bias, norm, residual, eps, gated, scale, zero = given
        if form != CUBLAS:
            assert self.kernels.product is not None
            return self.kernels.product(*given, form)
        if scale is not None:
            weight = dequantized(weight, scale, x.dtype, zero)
        y = F.linear(x if norm is None else self.kernels.rms_norm(x, norm, eps), weight, bias)
        y = self.kernels.swiglu(y) if gated else y
        return y if residual is None else residual + y

    def choose(self, asked: AskedProduct) -> str:
        """The form that serves."""
        offered = self.offered(asked)
        if not offered:
            return CUBLAS
        try:
            with self.card.waiting():
                form, why = self.kept(asked, offered)
        except LanternError as error:
            form, why = CUBLAS, f"no choice is kept: {error.reason}"
        except RuntimeError as error:  # of the driver, while cuBLAS was timed
            form, why = CUBLAS, f"nothing was timed: {checks.error_line(error)}"
        self.note(str(asked), f"{form}: {why}")
        return form

    def offered(self, asked: AskedProduct) -> list[str]:
        units = self.card.multiplies_matrices()
        return [form for form in asked.offered if units or FORMS[form].kernel != "dot"]

    def kept(self, asked: AskedProduct, offered: Sequence[str]) -> Choice:
        """What was chosen for this machine, now if not before; of two processes the first that writes decides."""
        numbers = {form: str(FORMS[form]) for form in offered}
        about = {"name": str(asked), "forms": numbers, "kernel": checks.text_digest(*TEXTS)}
        file = own_cache("forms") / f"{checks.digest(about)}-{checks.digest(self.machine)}.json"
        check = ProductCheck(asked, self.multiply)
        if not file.exists():
            form, why = self.fastest(asked, check, offered)
            others = map(self.apart, file.parent.glob(f"{checks.digest(about)}-*"))
            why = "; ".join([why, *filter(None, others)])
            result = {"form": form, "why": why, "machine": self.machine, "product": about}
            with suppress(OutputError):
                write_file(file, json.dumps(result, indent=1).encode())
        with reading(file, "delete it") as saved:
            form, why = str(saved["form"]), str(saved["why"])
        wrong = check.fault(form)
        return (CUBLAS, f"{form} is refused: {wrong}") if wrong else (form, why)

    def apart(self, file: Path) -> str:
        """What of the machine of a choice is not of this one."""
        with suppress(LanternError), reading(file) as saved:
            theirs = saved["machine"].items() - self.machine.items()
            return f"that of {', '.join(map(' '.join, sorted(theirs)))} is not used"
        return ""

    def fastest(self, asked: AskedProduct, check: ProductCheck, offered: Sequence[str]) -> Choice:
        """By the clock, of the forms that are right."""
        taken = {CUBLAS: self.seconds(asked, CUBLAS)}
        faults = {form: check.fault(form) for form in offered}
        for form in [form for form, why in faults.items() if not why]:
            try:
                taken[form] = self.seconds(asked, form)
            except RuntimeError as error:  # of the driver, within a graph
                faults[form] = checks.error_line(error)
        best = min(taken, key=lambda form: taken[form])
        if taken[best] > GAIN * taken[CUBLAS]:
            best = CUBLAS
        said = [f"{form} {1e6 * seconds:.2f} us" for form, seconds in taken.items()]
        said += [f"{form} is refused: {why}" for form, why in faults.items() if why]
        return best, "; ".join(said)

    def seconds(self, asked: AskedProduct, form: str) -> float:
        """Of one product, in turn in all blocks, so that no cache holds their matrices.

        Without the residual sum of cuBLAS's, which the next norm may take.
        """
        x, residual = asked.inputs()
        added = None if form == CUBLAS else residual

        def run() -> None:
            for part in asked.parts:
                self.multiply(form, *part.arguments(x, added))

        return self.card.seconds(run) / len(asked.parts)


def kept_choices(machine: dict[str, str]) -> list[str]:
    """A line for each choice that is kept for this machine, and one for those of others."""
    lines, others = [], 0
    for file in own_cache("forms").glob("*.json"):
        with suppress(LanternError), reading(file) as saved:
            kernel = saved["product"].get("kernel")
            if saved["machine"] == machine and kernel == checks.text_digest(*TEXTS):
                lines.append(f"{saved['product']['name']}: {saved['form']}: {saved['why']}")
            else:
                others += 1
    more = f"{others} of other cards, drivers or versions, not used"
    return sorted(lines) + ([more] if others else [])


# ------------------------------------------------------------------------------------ in a model


class BlockForms:
    """A block's own form in a module: each product as was chosen for its rows."""

    def __init__(self, blocks: Sequence[nn.Module], forms: Forms) -> None:
        self.parts = {block: products_of(block) for block in blocks}
        self.forms = forms
        self.chosen: dict[int, dict[str, str]] = {}  # by rows and product

    def serves(self, x: Tensor) -> bool:
        """Whether any product over x [R, T, H] has another form than the block's own.

        What is not chosen yet is chosen: in the run before a recording, which has the same rows.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        rows = x.numel() // x.shape[-1]
        blocks = list(self.parts.values())
        if rows not in self.chosen:
            self.chosen[rows] = {
                name: self.forms.choose(
                    AskedProduct(name, [parts[name] for parts in blocks], rows, x.dtype)
                )
                for name in blocks[0]
            }
        return any(form != CUBLAS for form in self.chosen[rows].values())

    def __call__(
        self, block: Any, x: Tensor, more: Tensor | None, *attended: Any
    ) -> tuple[Tensor, Tensor | None]:
        """`Block.residual` without its case of words: of x + more [R, T, H]; the second may be in the first."""
        chosen = self.chosen[x.numel() // x.shape[-1]]
        parts = self.parts[block]

        def enter(name: str, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
            """x + more, and the product of its norm."""
            (linear, norm, gated, _) = parts[name]
            form = chosen[name]
            if form == CUBLAS and norm is not None and more is not None:
                x, normed = norm.add(x, more)
                y = linear(normed)
                return x, self.forms.kernels.swiglu(y) if gated else y
            x = x if more is None else x + more
            return x, self.forms.multiply(form, *parts[name].arguments(x, None))

        def leave(name: str, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
            """x and the product of y, or their sum alone."""
            if chosen[name] == CUBLAS:
                return x, parts[name].linear(y)
            return self.forms.multiply(chosen[name], *parts[name].arguments(y, x)), None

        x, heads = enter("qkv", x, more)
        x, more = leave("out", block.attention.mix(heads, *attended), x)
        x, fed = enter("gate_up", x, more)
        return leave("down", fed, x)


class LinearForm:
    """What a linear layer outside of blocks is called by: a head, or what a drafter's block reads."""

    def __init__(self, name: str, linear: Any, forms: Forms) -> None:
        self.name, self.part, self.forms = name, BlockProduct(linear), forms
        self.plain: Callable[[Tensor], Tensor] = linear.forward
        self.chosen: dict[int, str] = {}  # by rows

    def __call__(self, x: Tensor) -> Tensor:
        """x [.., K] -> [.., N]; see `BlockForms.serves`."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.plain(x)
        rows = x.numel() // x.shape[-1]
        if rows not in self.chosen:
            asked = AskedProduct(self.name, [self.part], rows, x.dtype)
            self.chosen[rows] = self.forms.choose(asked)
        if self.chosen[rows] == CUBLAS:
            return self.plain(x)
        return self.forms.multiply(self.chosen[rows], *self.part.arguments(x, None))


def install(modules: Sequence[nn.Module], forms: Forms) -> None:
    """Give a target and its drafter their forms: blocks where all of them fit, and the matrices outside of them."""
    for module in modules:
        block = getattr(module, "block", None)
        blocks: list[Any] = [*getattr(module, "layers", ()), *([] if block is None else [block])]
        if not (blocks and all(hasattr(block, "fused") for block in blocks)):
            continue
        if all(map(fits, blocks)):
            for alike in kinds_of(blocks):
                fused = BlockForms(alike, forms)
                for block in alike:
                    block.fused = fused
        inside = {part for block in blocks for part in block.modules()}
        for kind in (nn.Linear, QuantizedLinear):
            for path, linear in matrix_layers(module, kind):
                if linear not in inside and is_whole(linear):
                    linear.forward = LinearForm(path.rpartition(".")[2], linear, forms)


def kinds_of(blocks: Sequence[Any]) -> list[list[Any]]:
    """Blocks whose matrices have the same formats: a checkpoint may keep some layers as floats, others in 4 bits."""
    kinds: dict[Any, list[Any]] = {}
    for block in blocks:
        linears = [part.linear for part in products_of(block).values()]
        formats = tuple((linear.weight.dtype, getattr(linear, "group", 0)) for linear in linears)
        kinds.setdefault(formats, []).append(block)
    return list(kinds.values())


def fits(block: Any) -> bool:
    """Whether its products are matrices in one piece, with nothing behind them."""
    norms = (block.attention_post_norm, block.ffn_post_norm)
    whole = all(is_whole(part.linear) for part in products_of(block).values())
    return whole and all(isinstance(norm, nn.Identity) for norm in norms)


def is_whole(linear: Any) -> bool:
    weight = getattr(linear, "weight", None)
    return type(weight) is nn.Parameter and weight.is_contiguous()
