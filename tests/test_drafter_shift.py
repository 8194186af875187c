"""A drafter that was trained on unshifted tokens, as Lumina-mGPT's was, accepts more when it drafts with them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.models.config import DrafterConfig
from lantern_hpu.models.transformer import Drafter
from lantern_hpu.ops.buffers import additive_mask
from lantern_hpu.tree import DraftTree
from tests.tiny import Models, condition, request, sample, tiny_config, tiny_models
from tests.twin import full_mask, turned

CONFIG = tiny_config(rope="1d", rope_pairs="half", qk_norm=True, grid=(8, 8), layers=3)
PROMPTS = ["a", "ab", "abc", "abcd"] * 16


def images(models: Models, tree: DraftTree | str, seed: int) -> tuple[Tensor, float]:
    """Tokens [64, N], and how many a step had."""
    requests = [request(p, seed + i, cfg_scale=1.0) for i, p in enumerate(PROMPTS)]
    drawn = sample(models, tree, requests)
    return torch.from_numpy(drawn.tokens), drawn.tokens.size / sum(drawn.steps)


def trained(models: Models, tokens: Tensor, steps: int) -> Drafter:
    """By EAGLE's loss with uniform noise on features, each entry paired with its own token; a frozen embedding."""
    target, drafter = models[0], Drafter(CONFIG, DrafterConfig(input_norm=True)).train()
    nn.Module.requires_grad_(target, False)
    drafter.embed.weight.data.copy_(target.embed.weight)
    drafter.embed.requires_grad_(False)
    prefix = condition(CONFIG, PROMPTS * (len(tokens) // 64), guidance=False)
    x = torch.cat([prefix.embeddings, target.embed(tokens[:, :-1])], 1)
    length, first = x.shape[1], CONFIG.prefix - 1
    rope, mask = turned(CONFIG, prefix.valid, length + 1), full_mask(prefix.valid, length)
    hidden = target(x, rope[:, :length], additive_mask(mask, x.dtype))
    probs = target.head(hidden).softmax(-1)
    unshifted = F.pad(tokens, (first + 1, 0))[:, : length - 1]
    mask = additive_mask(mask[:, :-1, :-1], x.dtype)
    weights = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.95))
    for _ in range(steps):
        some = torch.randint(len(tokens), (32,))
        read = hidden[some, :-1] + (torch.rand(32, length - 1, CONFIG.dim) - 0.5) * 0.2
        guess = drafter(unshifted[some], read, rope[some, 1:length], mask[some])[:, first:]
        goal, p = hidden[some, 1:][:, first:], probs[some, 1:][:, first:]
        cross = -(p * target.head(guess).log_softmax(-1)).sum(-1).mean()
        loss = F.smooth_l1_loss(guess, goal) + 0.1 * cross
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
    return drafter.requires_grad_(False).eval()


@pytest.mark.slow
def test_an_unshifted_drafter_accepts_more_unshifted() -> None:
    models = tiny_models(CONFIG, seed=3)
    root = DraftTree.root_only()
    tokens = torch.cat([images(models, root, 100 * i)[0] for i in range(1, 5)])
    torch.manual_seed(1)
    drafter = trained(models, tokens, 600)
    found = {}
    for shift in (0, 1):
        drafter.shift = shift
        found[shift] = images((models[0], drafter), "chain", 10000)[1]
    assert found[0] > 1.03 * found[1] > 1.03
