"""Other people's models on the emulated card: wrapped in either way and trained, they give the CPU's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gaudi_emulator import emulate

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
}
WITHOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS = {"input_ids": torch.arange(16).view(2, 8) * 3 % 64}


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(vocab_size=64, **SIZES, **WITHOUT))


def gpt2() -> nn.Module:
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, **still, **ends)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, num_key_value_heads=1, use_cache=False, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    return transformers.ViTModel(
        transformers.ViTConfig(image_size=16, patch_size=8, **SIZES, **WITHOUT)
    )


class UNetBlock(nn.Module):
    """A level of a denoising network: down, attention to a context, up, the time added and the input skipped to."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.time = nn.Conv2d(4, 16, 3, padding=1), nn.Linear(8, 16)
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(3))
        self.down = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(8, 32)
        self.up, self.leave = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, sample: torch.Tensor, time: torch.Tensor, context: torch.Tensor) -> Any:
        skip = self.enter(sample)  # [B, 16, 8, 8]
        waves = torch.cat([time.sin(), time.cos()], -1)  # [B, 8]
        x = self.norms[0](skip).relu() + self.time(waves)[:, :, None, None]
        x = self.down(F.silu(self.norms[1](x)))  # [B, 16, 4, 4]
        q = self.q(x.flatten(2).mT).unflatten(-1, (2, 8)).transpose(1, 2)  # [B, 2, 16, 8]
        k, v = self.kv(context).unflatten(-1, (4, 8)).transpose(1, 2).chunk(2, 1)  # [B, 2, 3, 8]
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # [B, 16, 16]
        x = x + seen.mT.unflatten(-1, (4, 4))
        x = self.up(F.interpolate(F.silu(self.norms[2](x)), scale_factor=2.0, mode="nearest"))
        return Denoised(last_hidden_state=self.leave(torch.cat([x, skip], 1)))


@dataclass
class Denoised:
    last_hidden_state: torch.Tensor  # [B, 4, 8, 8]


NOISY = {
    "sample": torch.linspace(-1, 1, 512).sin().view(2, 4, 8, 8),
    "time": torch.linspace(0, 3, 8).view(2, 4),
    "context": torch.linspace(-2, 2, 48).view(2, 3, 8),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "BERT": (bert, IDS),
    "GPT-2": (gpt2, IDS),
    "Llama": (llama, IDS),
    "UNet block": (UNetBlock, NOISY),
    "ViT": (vit, {"pixel_values": torch.linspace(-1, 1, 1536).view(2, 3, 16, 16)}),
}


def first(output: Any) -> torch.Tensor:
    found: torch.Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return found


@pytest.mark.parametrize("live", [False, True], ids=["static inputs", "live inputs"])
@pytest.mark.parametrize("name", MODELS)
def test_wrapped_model_gives_the_cpus_numbers(name: str, live: bool) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    twin = make().eval()
    with emulate(lazy=True) as card, torch.no_grad():
        hpu: Any = torch.hpu  # type: ignore[attr-defined]
        model = copy.deepcopy(twin).to("hpu")
        model = hpu.wrap_in_hpu_graph(model, disable_tensor_cache=live)
        for turn in range(3):
            given = {n: x.roll(turn, -1) for n, x in inputs.items()}
            got = model(**{n: x.to("hpu") for n, x in given.items()})
            want = twin(**given)
            assert type(got) is type(want)
            assert torch.allclose(first(got).cpu(), first(want), atol=1e-5)
        assert card.counts.graphs["captured"] == 1


@pytest.mark.parametrize("name", MODELS)
def test_model_learns_what_it_learns_on_the_cpu(name: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    twin = make().train()
    with emulate(lazy=True):
        model = copy.deepcopy(twin).to("hpu")
        for one, device in ((twin, "cpu"), (model, "hpu")):
            learner = torch.optim.SGD(one.parameters(), 0.1)
            for _ in range(2):
                loss = first(one(**{n: x.to(device) for n, x in inputs.items()})).square().mean()
                learner.zero_grad()
                loss.backward()
                learner.step()
        for got, want in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(got.detach().cpu(), want.detach(), atol=1e-4)


def test_static_cache_in_a_graph_gives_the_cpus_text() -> None:
    torch.manual_seed(0)
    twin = llama().eval()
    prompt, rows = torch.tensor([[5, 9, 2]]), {}
    with emulate(lazy=True) as card, torch.no_grad():
        hpu: Any = torch.hpu  # type: ignore[attr-defined]
        for device in ("cpu", "hpu"):
            model = twin if device == "cpu" else copy.deepcopy(twin).to("hpu")
            cache = transformers.StaticCache(config=twin.config, max_cache_len=16)
            options = {"past_key_values": cache, "use_cache": True}
            token = model(prompt.to(device), **options).logits[:, -1:].argmax(-1)
            if device == "hpu":
                model = hpu.wrap_in_hpu_graph(model)
            rows[device] = [token.item()]
            for _ in range(8):
                token = model(token.clone(), **options).logits.argmax(-1)
                rows[device].append(token.item())
        assert rows["hpu"] == rows["cpu"]
        assert card.counts.graphs["captured"] == 1 and card.counts.graphs["replayed"] == 7
