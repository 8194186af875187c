"""The emulated card: operators run at once on CPU tensors, and are booked, checked and recorded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, inference_mode
from torch.random import fork_rng, manual_seed

from gaudi_emulator import checks, ops
from gaudi_emulator.card import Card
from gaudi_emulator.tensor import Args, HPUTensor, Kwargs, card_in_use, cards, flat, raw

LIMIT = int(94.62 * 2**30)  # bytes that software sees of a Gaudi 2


class Lease:
    """Lives as long as a tensor's memory is referenced."""


class Device(Card):
    """One emulated card."""

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """One operator with a device tensor among its arguments, or a factory on the device."""
        op = ops.op_of(func, self.release)
        if op.packet in ops.MADE_LIKE:  # shape and format of a tensor are read, not its numbers
            like, *rest = args
            if kwargs.get("device") == torch.device("cpu"):
                return func(like.raw, *rest, **kwargs)
            args = (like if isinstance(like, HPUTensor) else HPUTensor(like.detach()), *rest)
        if op.packet in SPECIAL:
            return SPECIAL[op.packet](self, op, func, args, kwargs)
        return self.operate(op, func, args, kwargs)

    def operate(self, op: ops.Op, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Check, run on the CPU tensors, book, record, wrap."""
        checks.before(self, op, args, kwargs)
        held: dict[int, HPUTensor] = {}
        raw_args = tuple(self.unwrap(op, value, held) for value in args)
        raw_kwargs = {name: self.unwrap(op, value, held) for name, value in kwargs.items()}
        if raw_kwargs.get("device") is not None:
            raw_kwargs["device"] = torch.device("cpu")
        if why := checks.falls_back(self, op, args, kwargs):
            self.fall_back(op, why)
        for target in ops.written_arguments(op, raw_args, raw_kwargs):
            if self.rehearsed is not None:
                self.rehearsed.keep(target)
            if self.recording is not None:
                self.recording.keep(target)
                if op.packet in checks.INDEX_WRITES and self.recording.write_by_index(target):
                    # Right in lazy mode; the same function under hpu_backend would be a chain.
                    self.findings.hit("H092", f"{op.name}; lazy mode keeps both", "info")
        if op.random:
            self.findings.hit("H071")
        seed = self.draw_seed(kwargs.get("generator")) if op.random else None
        result = self.compute(op, func, raw_args, raw_kwargs, seed)
        if self.lazy:
            self.book(op, args, kwargs)
        else:
            self.counts.launches += 1
        if self.rehearsed is not None:
            self.rehearsed.add(op, raw_args, raw_kwargs, result)
        if self.recording is not None:
            self.recording.add(op, func, raw_args, raw_kwargs, result)
        if result is None:  # no result brings a new shape of what was written
            for target in flat(ops.written_arguments(op, args, kwargs)):
                if isinstance(target, HPUTensor):
                    target.synced()
        return self.wrap(op, args, result, held)

    def compute(self, op: ops.Op, func: Any, args: Args, kwargs: Kwargs, seed: int | None) -> Any:
        """An operator on CPU tensors, with its results stored as the device stores them."""
        if op.packet in ("_to_copy", "copy_"):
            args = checks.saturated(self, op, args, kwargs)
        try:
            result = execute(func, args, kwargs, seed)
        except (IndexError, RuntimeError) as error:
            if op.packet not in checks.INDEXED:
                raise
            if "single memory location" in str(error):  # a tensor written from itself
                args = (args[0], *(a.clone() if isinstance(a, Tensor) else a for a in args[1:]))
            else:
                # The device does not check bounds. It was reported; here the nearest element is taken.
                args = checks.clamped(op, args)
            result = execute(func, args, kwargs, seed)
        if op.view_of is None:
            checks.narrow(self, op, (result, *ops.written_arguments(op, args, kwargs)))
        return result

    def unwrap(self, op: ops.Op, value: Any, held: dict[int, HPUTensor]) -> Any:
        if isinstance(value, HPUTensor):
            if value.stale is not None:
                self.findings.hit(value.stale, op.name)
            held[id(value.raw)] = value
            return value.raw
        if isinstance(value, Tensor):
            checks.foreign(self, op, value)
            if self.recording is not None and id(value) not in self.recording.rebound:
                return value.clone()  # baked in
        if isinstance(value, (list, tuple)):
            return [self.unwrap(op, item, held) for item in value]
        return value

    def wrap(self, op: ops.Op, args: Args, result: Any, held: dict[int, HPUTensor]) -> Any:
        if isinstance(result, (list, tuple)):
            return type(result)(self.wrap(op, args, item, held) for item in result)
        if not isinstance(result, Tensor):
            return result
        if id(result) in held:
            return held[id(result)].synced()
        if op.view_of is not None:
            source = args[op.view_of]
            base = source.base if source.base is not None else source
            named = op.packet in ("detach", "alias") and base is source
            # A view of an ordinary tensor is an ordinary one, also under inference_mode
            with inference_mode(source.is_inference()):
                made = HPUTensor(result, None if named else base)
            if named:  # another name, as `.data` makes it; not a view
                made.lease = source.lease
            return made
        return self.new(result)

    def new(self, raw: Tensor) -> HPUTensor:
        """A tensor with storage of its own."""
        checks.known_format(raw.dtype)
        made = HPUTensor(raw)
        self.allocate(made, checks.stored_size(self, raw))
        if self.recording is not None:
            self.recording.follow(made)
        return made

    def allocate(self, owner: HPUTensor, size: int) -> None:
        self.in_use += size
        self.peak, self.largest = max(self.peak, self.in_use), max(self.largest, size)
        self.allocs += 1
        owner.lease = Lease()  # it goes where the numbers go, also if two tensors are swapped
        weakref.finalize(owner.lease, self.free, size).atexit = False

    def free(self, size: int) -> None:
        self.in_use -= size
        self.frees += 1

    def upload(self, values: Tensor) -> HPUTensor:
        """A CPU tensor as a new device tensor."""
        raw = self.accept(values).detach().clone()
        checks.stored(self, raw)
        return self.new(raw)

    def accept(self, values: Tensor) -> Tensor:
        """Book an upload."""
        checks.upload(self, values)
        self.book_upload()
        return values

    def fall_back(self, op: ops.Op, why: str) -> None:
        """The operator runs on the host."""
        self.counts.fallbacks[op.name] += 1
        self.findings.hit("H040", f"{op.name}: {why}")
        allowed = self.flags.get("PT_HPU_PLACE_ON_CPU", "")
        if allowed and op.packet not in allowed.split(","):
            raise RuntimeError(f"{op.name} is not yet supported on HPU.")
        if self.recording is not None:
            raise RuntimeError(
                f"cpu fallback is not supported during hpu graph capturing ({op.name})"
            )
        self.wait("fallback")

    def draw_seed(self, generator: torch.Generator | None = None) -> int:
        """The seed of one random operator: one draw of the host's generator, or of one that was passed."""
        return int(torch.randint(2**31, (), generator=generator or self.generator))

    def listen(self) -> None:
        """Enter the modes that catch torch's calls."""
        for mode in getattr(self.threads, "modes", ()):
            mode.__enter__()

    def deaf(self) -> None:
        for mode in reversed(getattr(self.threads, "modes", ())):
            mode.__exit__(None, None, None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave torch to itself for a while."""
        self.deaf()
        try:
            yield
        finally:
            self.listen()


def execute(func: Any, args: Args, kwargs: Kwargs, seed: int | None) -> Any:
    """Run an operator on CPU tensors; a random one from its own seed."""
    func = STAND_INS.get(func._schema.name, func)
    if func in BYTE_BY_BYTE and args[0].dtype in ops.FLOAT8:
        return moved_as_bytes(func, args, kwargs)
    if seed is None:
        return func(*args, **kwargs)
    with fork_rng(devices=[]):
        manual_seed(seed)
        return func(*args, **{n: None if n == "generator" else v for n, v in kwargs.items()})


def moved_as_bytes(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """An operator that only moves numbers of one byte, for which the CPU has no kernel."""
    first, eights = args[0], (isinstance(a, Tensor) and a.dtype in ops.FLOAT8 for a in args)
    plain = [a.view(torch.uint8) if is8 else a for a, is8 in zip(args, eights, strict=True)]
    made = func(*plain, **kwargs)
    return first if made is plain[0] else made.view(first.dtype)


def batch_norm(
    x: Tensor,  # [N, C, ...]
    weight: Tensor | None,  # [C], also in a lower format than the statistics
    bias: Tensor | None,
    mean: Tensor | None,  # [C], and so is var
    *rest: Any,
) -> Any:
    if mean is not None and mean.dtype == torch.float32:
        weight, bias = (None if t is None else t.float() for t in (weight, bias))
    return torch.native_batch_norm(x, weight, bias, mean, *rest)


def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, *rest: Any
) -> Any:
    lower = weight is not None and mean is not None and weight.dtype != mean.dtype == torch.float32
    made = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight.float() if lower and weight is not None else weight, mean, *rest
    )
    if not lower or weight is None:
        return made
    return (made[0], *(None if t is None else t.to(weight.dtype) for t in made[1:]))


def take(x: Tensor, index: Tensor) -> Tensor:
    return torch.take(x, index.long())


def histc(x: Tensor, *bins: Any, **limits: Any) -> Tensor:
    return torch.histc(x.float(), *bins, **limits).to(x.dtype)


# Operators that the device has in more number formats than the CPU
STAND_INS: dict[str, Callable[..., Any]] = {
    "aten::take": take,
    "aten::histc": histc,
    "aten::native_batch_norm": batch_norm,
    "aten::native_batch_norm_backward": batch_norm_backward,
}

BYTE_BY_BYTE = frozenset(
    getattr(torch.ops.aten, name).default for name in ("index_copy", "index_copy_", "gather")
)

# Operators that move data or read it


def read_scalar(device: Device, op: ops.Op, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return func(device.read(args[0], "item", "H001"))


def compare_on_host(device: Device, op: ops.Op, func: Any, args: Args, kwargs: Kwargs) -> Any:
    device.sync(op.packet, "H004")
    checks.no_bare_meta(args, op.name)
    return func(*map(raw, args), **kwargs)


def to_copy(device: Device, op: ops.Op, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Another dtype or another device."""
    goal = kwargs.get("device")
    rest = {name: value for name, value in kwargs.items() if name != "device"}
    (source,) = args
    if not isinstance(source, HPUTensor):
        return device.upload(func(source, **rest))
    if goal is not None and torch.device(goal).type == "cpu":
        return func(device.read(source, "copy to the host"), **rest)
    return device.operate(op, func, args, rest)


def copy(device: Device, op: ops.Op, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`copy_` within the device, up or down."""
    goal, source = args[:2]
    checks.no_bare_meta((goal, source), op.name)
    if not isinstance(goal, HPUTensor):
        return func(goal, device.read(source, "copy to the host"))
    if isinstance(source, HPUTensor):
        return device.operate(op, func, args, kwargs)
    if source.dim() == 0 and goal.dim() > 0:  # a 0-dimensional CPU tensor is a scalar
        return device.operate(op, func, (goal, source), kwargs)
    if goal.raw.untyped_storage().data_ptr() in device.written:
        device.flush("upload into a pending tensor")
    checks.view_write(device, op, goal)
    if device.rehearsed is not None:
        device.rehearsed.keep(goal.raw)
    goal.raw.copy_(device.accept(source))
    return goal


def stay(device: Device, op: ops.Op, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """torch's own bookkeeping of tensors that Python numbers became: no operator of the device."""
    return args[0]


def grouped_products(device: Device, op: ops.Op, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """torch composes it: a product a group, whose size is read from the offsets (ATen's GroupedMMUtils.h, 2.10)."""
    x, weights = args[:2]  # [S, K], [groups, K, N]
    offsets: HPUTensor = kwargs["offs"] if "offs" in kwargs else args[2]
    device.findings.hit("H010", op.name)
    ends = device.read(offsets, "sizes of groups").tolist()
    made = x.new_empty(len(x), weights.shape[-1])
    for start, end, weight in zip([0, *ends], ends, weights.unbind(), strict=False):
        torch.mm(x[start:end], weight, out=made[start:end])
    return made


SPECIAL = {
    "_local_scalar_dense": read_scalar,
    "equal": compare_on_host,
    "_to_copy": to_copy,
    "copy_": copy,
    "lift_fresh": stay,
    "_grouped_mm": grouped_products,
}

# The card in use


def current() -> Device:
    """The installed card."""
    card: Device = card_in_use()
    return card


def listening() -> bool:
    """Whether a card is installed."""
    return bool(cards)


@contextmanager
def as_current(device: Device) -> Iterator[Device]:
    cards.append(device)
    try:
        yield device
    finally:
        cards.remove(device)
