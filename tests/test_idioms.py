"""Ways in which programs for Gaudi are written: each runs to its end under the lint, without a finding of error level.

One small program a kind, in the styles of Hugging Face's optimum-habana (h), vllm-gaudi (v) and Model-References (m);
each asserts its own numbers. What a program may do on a card must neither die nor be called wrong here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_emulator.lint import lint_script

pytestmark = pytest.mark.slow

START = """
import copy, io, os
import torch
import torch.nn.functional as F
from torch import nn
import habana_frameworks.torch as ht
import habana_frameworks.torch.core as htcore
from gaudi_emulator import warmed_up
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x, scale=None):
        y = self.second(F.gelu(self.first(x)))
        return y if scale is None else y * scale

twin = Net().eval()
model = copy.deepcopy(twin).to("hpu")
x = torch.randn(2, 4)
near = lambda a, b: torch.allclose(a.detach().cpu(), b.detach().cpu(), atol=1e-5)
"""

TRAIN = """
loader = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(4)]
for one, device in ((twin, "cpu"), (model, "hpu")):
    learner = {learner}
    for data, goal in loader:
        data, goal = data.to(device, non_blocking=True), goal.to(device, non_blocking=True)
        loss = F.mse_loss(one(data), goal)
        learner.zero_grad(set_to_none=True)
        loss.backward()
        htcore.mark_step()
        {clip}
        learner.step()
        htcore.mark_step()
assert all(near(a, b) for a, b in zip(model.parameters(), twin.parameters()))
"""

CACHE = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
    def forward(self, x, k_cache, v_cache, place, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        k_cache.index_copy_(1, place, k)
        v_cache.index_copy_(1, place, v)
        return F.scaled_dot_product_attention(q, k_cache, v_cache, mask)

host = Attention().eval()
device = copy.deepcopy(host).to("hpu")
def caches(where):
    return [torch.zeros(2, 16, 8, device=where) for _ in "kv"]
def mask_of(n):
    return torch.where(torch.arange(16) <= n, 0.0, -1e9).view(1, 1, 16)
"""

IDIOMS: dict[str, str] = {
    # Training
    "training with step marks (m)": TRAIN.format(
        learner="torch.optim.SGD(one.parameters(), 0.1)", clip="pass"
    ),
    "training under autocast (h, m)": """
learner = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
for _ in range(3):
    with torch.autocast(device_type="hpu", dtype=torch.bfloat16, enabled=True):
        out = model(x.to("hpu"))
        loss = out.float().square().mean()
    assert out.dtype == torch.bfloat16
    loss.backward()
    learner.step()
    learner.zero_grad()
    htcore.mark_step()
assert loss.item() < 1
""",
    # HPU graphs
    "a wrapped model (h, v, m)": """
model = ht.hpu.wrap_in_hpu_graph(model)
with torch.no_grad():
    for turn in range(4):
        assert near(model((x + turn).to("hpu")), twin(x + turn))
""",
    "a wrapped model without the tensor cache (v)": CACHE
    + """
device = ht.hpu.wrap_in_hpu_graph(device, disable_tensor_cache=True)
there, here = caches("hpu"), caches("cpu")
with torch.inference_mode():
    for n in range(5):
        x, place = torch.randn(2, 1, 8), torch.tensor([n])
        got = device(x.to("hpu"), *there, place.to("hpu"), mask_of(n).to("hpu"))
        assert near(got, host(x, *here, place, mask_of(n)))
""",
    "graphs kept by hand, keyed by their inputs (h, diffusion)": """
stream, cache = ht.hpu.Stream(), {}
def call(*inputs):
    key = ht.hpu.graphs.input_hash(inputs)
    known = cache.get(key)
    if known is None:
        with ht.hpu.stream(stream):
            graph = ht.hpu.HPUGraph()
            graph.capture_begin()
            outputs = model(*inputs)
            graph.capture_end()
            cache[key] = ht.hpu.graphs.CachedParams(inputs, outputs, graph)
        return outputs
    ht.hpu.graphs.copy_to(known.graph_inputs, inputs)
    known.graph.replay()
    ht.core.hpu.default_stream().synchronize()
    return known.graph_outputs
with torch.no_grad():
    for turn in range(4):
        assert near(call((x + turn).to("hpu")), twin(x + turn))
assert len(cache) == 1
""",
    # Text generation
    "a static cache and a token index (h)": CACHE
    + """
device = ht.hpu.wrap_in_hpu_graph(device)
there, here = caches("hpu"), caches("cpu")
place = torch.zeros(1, dtype=torch.int64, device="hpu")
mask = mask_of(0).to("hpu")
with torch.no_grad():
    for n in range(5):
        x = torch.randn(2, 1, 8)
        mask.copy_(mask_of(n))
        got = device(x.to("hpu"), *there, place, mask)
        assert near(got, host(x, *here, torch.tensor([n]), mask_of(n)))
        place.add_(1)
        htcore.mark_step()
""",
    "prompts padded to buckets, warmed up (h, v)": """
buckets = (4, 8, 16)
table = nn.Embedding(32, 4).to("hpu")
net = ht.hpu.wrap_in_hpu_graph(model)
def run(ids):
    width = next(b for b in buckets if b >= ids.shape[1])
    ids = F.pad(ids, (0, width - ids.shape[1]))
    return net(table(ids.to("hpu")))
with torch.no_grad():
    for width in buckets * 2:  # a capture and a replay of each
        run(torch.zeros(2, width, dtype=torch.int64))
        htcore.mark_step()
    warmed_up()
    for width in (3, 5, 9, 16):
        run(torch.randint(32, (2, width)))
        htcore.mark_step()
""",
    # Fused kernels
    "fused attention, norm and rotary embedding (h, v)": """
from habana_frameworks.torch.hpex.kernels import FusedSDPA, RotaryPosEmbeddingHelperV2 as Rope
from habana_frameworks.torch.hpex.normalization import FusedRMSNorm
q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
angles = torch.rand(16, 8)
ids = torch.tensor([[3, 4, 5, 6]])
def turned(t):
    cos, sin = angles.cos()[ids][:, None], angles.sin()[ids][:, None]
    first, second = t.chunk(2, -1)
    return t * cos + torch.cat([-second, first], -1) * sin
cos, sin, there = angles.cos().to("hpu"), angles.sin().to("hpu"), ids.to("hpu")
with ht.hpu.sdp_kernel(enable_recompute=True):
    got = FusedSDPA.apply(Rope.apply(q.to("hpu"), cos, sin, there), Rope.apply(k.to("hpu"), cos, sin, there),
                          v.to("hpu"), None, 0.0, True, None)
assert near(got, F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True))
norm = FusedRMSNorm.apply(q.to("hpu"), torch.ones(8, device="hpu"), 1e-6)
assert near(norm, q * (q.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
""",
    # Diffusion
    "a denoising loop with guidance (h, diffusion)": """
net = ht.hpu.wrap_in_hpu_graph(model)
sigmas = torch.linspace(1, 0.1, 5)
there, here = x.to("hpu"), x.clone()
times = sigmas.to("hpu")
with torch.no_grad():
    for n in range(5):
        out = net(torch.cat([there] * 2), times.index_select(0, torch.tensor([n], device="hpu")))
        plain, led = out.chunk(2)
        there = there - 0.1 * (plain + 2.0 * (led - plain))
        htcore.mark_step(sync=True)
        plain, led = twin(torch.cat([here] * 2), sigmas[n]).chunk(2)
        here = here - 0.1 * (plain + 2.0 * (led - plain))
assert near(there, here)
""",
    # Tools and surroundings
    "flags set before the import, and questions to the software (h, v)": """
import importlib.util
assert importlib.util.find_spec("habana_frameworks") and importlib.util.find_spec("habana_frameworks.torch")
from habana_frameworks.torch.utils.internal import is_lazy
import habana_frameworks.torch.utils.experimental as htexp
assert torch.hpu.is_available() and torch.hpu.device_count() == 1 and is_lazy()
assert torch.hpu.get_device_name().startswith("GAUDI2")  # the stand-in says that it is one
assert htexp._get_device_type() == htexp.synDeviceType.synDeviceGaudi2
assert torch.hpu.current_device() == 0 and torch.hpu.is_bf16_supported()
""",
    "events, streams and closures (h, m)": """
began, ended = (ht.hpu.Event(enable_timing=True) for _ in range(2))
began.record()
y = model(x.to("hpu"))
htcore.mark_step()
ended.record()
ended.synchronize()
assert began.elapsed_time(ended) >= 0
side = ht.hpu.Stream()
side.wait_stream(ht.hpu.current_stream())
with ht.hpu.stream(side):
    y = y * 2
seen = []
htcore.add_step_closure(lambda t: seen.append(t.sum().item()), (y,))
htcore.mark_step()
assert len(seen) == 1
""",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_runs_and_is_not_called_wrong(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    file = tmp_path / "idiom.py"
    file.write_text(START + IDIOMS[name])
    card, ended = lint_script(file, [], lazy=True)
    assert ended is None, repr(ended)
    errors = [(f.rule.id, f.line, f.detail) for f in card.findings.errors]
    assert errors == []
