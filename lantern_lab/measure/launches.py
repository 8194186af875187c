"""How many kernels a step launches on CUDA, counted on any machine: a captured graph holds as many.

    python -m lantern_lab.measure.launches --device cuda --method ar,scd@16,eagle@chain
    python -m lantern_lab.measure.launches --model llamagen-t2i-256 --operators

runs the step on tensors without storage. An operator of torch counts as the kernels that it launches on a card: views
and empty tensors none, most one, some more (`EXTRA`). The backend's own kernels count where they are launched. These
are counts and not times. What no count knows is which products cuBLAS splits along their sums, each with a second
kernel that adds the parts up: on an H200 those are the layers' down projections.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_hpu.backends.base import DevicePlan
from lantern_hpu.backends.cuda.backend import CUDABackend
from lantern_hpu.backends.cuda.kernels import triton_candidates
from lantern_hpu.core import Request
from lantern_hpu.decode.engine import Engine
from lantern_hpu.decode.requirements import find_model
from lantern_hpu.decode.spec import Spec
from lantern_hpu.methods.setting import ResolveContext, Setting, resolve
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.ops.kernels import PLAIN, Kernels
from lantern_hpu.results.tables import markdown
from lantern_lab.stretch import stretched_config

METHODS = "ar,scd@8,scd@16,eagle@chain,eagle@mc_sim_7b_63,lantern++@chain"
STRETCHED = (
    "llamagen-t2i-256"  # whose sizes the embedded model gets, as in benchmarks/results/xl-h200.json
)
MEMORY = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view".split()
)


def converted(x: Tensor, dtype: torch.dtype | None) -> int:
    """A sum in another format of whole numbers is taken of a copy in that format."""
    return int(dtype is not None and dtype != x.dtype)


# Kernels besides the first, from an operator's arguments
EXTRA: dict[str, Callable[..., int]] = {
    "cumsum": lambda x, dim, dtype=None: converted(x, dtype),
    "index": lambda x, index: sum(i is not None and i.dtype == torch.int32 for i in index),
    "masked_fill": lambda *_: 1,  # of a copy
    "scatter": lambda *_, **__: 1,  # into a copy
    "sort": lambda *_, **__: 1,
    "sum": lambda x, *_, dtype=None, **__: converted(x, dtype),
    "topk": lambda *_: 2,
}


class Launches(TorchDispatchMode):
    """Counts kernels by name, of what runs inside on tensors without storage."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        if space == "lantern_hpu":  # what it does on a card: other operators and kernels of Triton
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        result = func(*args, **kwargs)
        kernels = 0 if is_free(func, name, result) else 1
        if kernels and name in EXTRA:
            kernels += EXTRA[name](*args, **kwargs)
        if kernels:
            self.count[name] += kernels
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, a kernel of Triton is counted in place of being built and launched."""
        from triton.runtime.jit import JITFunction

        def launch(kernel: Any, *args: Any, **options: Any) -> None:
            self.count[kernel.fn.__name__] += 1

        with mock.patch.object(JITFunction, "run", launch), self:
            yield


def is_free(func: Any, name: str, result: Any) -> bool:
    """Whether an operator launches nothing: it makes a view or memory, or has nothing to compute."""
    if name in MEMORY or (isinstance(result, Tensor) and not result.numel()):
        return True
    returned = func._schema.returns
    alias = returned[0].alias_info if returned else None
    return alias is not None and not alias.is_write


def kernels_of(dtype: torch.dtype) -> Kernels:
    """CUDA's own, which are not run and so need not agree here."""
    found = triton_candidates(torch.device("cpu"), dtype)
    return replace(PLAIN, **{name: candidate.make() for name, candidate in found.items()})


def engine_of(config: ModelConfig, method: str, images: int = 1) -> Engine:
    """An engine without storage for guided images drawn from all tokens, as those of docs/performance.md."""
    target, dtype = config.target, torch.bfloat16
    context = ResolveContext(target.codes, target.tokens, config.drafter is not None)
    setting = resolve(Setting.parse(method), context)
    request = Request("a red apple", 0, relaxation=setting.relaxation)
    spec = Spec.of([request], setting.tree, images, target)
    kernels = kernels_of(dtype)
    with torch.device("meta"):
        model = Target(target, kernels).to(dtype).eval()
        drafter = None
        if config.drafter is not None:
            drafter = Drafter(target, config.drafter, kernels).to(dtype).eval()
        near = torch.empty(target.codes, max(spec.neighbours, 1), dtype=torch.int32)
    plan = DevicePlan(CUDABackend(), dtype, "eager", kernels)
    return Engine(model, drafter, spec, plan, near if spec.neighbours else None)


@torch.no_grad()
def count_step(engine: Engine) -> Counter[str]:
    """Kernels of one step by name."""
    from lantern_hpu.backends.cuda.kernels.attention import counters

    counters(engine.target.device, 0)  # made in the run before a recording
    launches = Launches()
    with launches.counting():
        engine.step_function(engine.state)
    return launches.count


def model_config(name: str | None) -> ModelConfig:
    """A known model's; without a name the embedded one's at LlamaGen-XL's sizes."""
    if name is not None:
        return find_model(name, PartOverrides()).config
    large = find_model(STRETCHED, PartOverrides()).config.target
    return stretched_config(find_model("builtin", PartOverrides()).config, STRETCHED, large)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the kernels that a step launches.")
    parser.add_argument("--device", default="cuda", choices=["cuda"], help="whose kernels (cuda)")
    parser.add_argument("--model", help="a known model (the embedded one at LlamaGen-XL's sizes)")
    parser.add_argument("--method", default=METHODS, help=f"comma-separated ({METHODS})")
    parser.add_argument("--batch-size", type=int, default=1, help="images decoded together (1)")
    parser.add_argument("--operators", action="store_true", help="and how many of each")
    args = parser.parse_args()
    config, lines = model_config(args.model), list[list[str]]()
    for method in args.method.split(","):
        count = count_step(engine_of(config, method, args.batch_size))
        lines.append([method, str(count.total())])
        if args.operators:
            lines += [["", f"{number} {name}"] for name, number in count.most_common()]
    print(markdown(["method", f"launches, {config.target.layers} layers"], lines))


if __name__ == "__main__":
    main()
