"""The decoder as a loop over one image: no cache, no batch, no static shape, q in plain Python.

It shares the networks with the product and nothing else of the decoder, so that it can judge it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lantern_hpu.core import Request, Sampling
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.transformer import Drafter, Target, rope_table
from lantern_hpu.ops import sampling
from lantern_hpu.ops.buffers import additive_mask, prefix_mask
from lantern_hpu.tree import DraftTree, DynamicTree, Tree
from tests.reference import Outcome, Probs, Relaxed, dynamic_tree, traverse, walk, wins
from tests.tiny import Models


def softmax(logits: Sequence[float]) -> Probs:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def slow_probs(logits: Sequence[float], sampling: Sampling, top_p_first: bool = False) -> Probs:
    """Temperature, then both filters by sorting, one on what the other leaves; equals at a border stay together."""
    if sampling.greedy:
        return softmax(logits)
    logits = [x / sampling.temperature for x in logits]
    filters = (slow_top_p, slow_top_k) if top_p_first else (slow_top_k, slow_top_p)
    for cut in filters:
        logits = cut(logits, sampling)
    return softmax(logits)


def slow_top_p(logits: Sequence[float], sampling: Sampling) -> list[float]:
    if sampling.top_p == 1:
        return list(logits)
    probs, mass, least = softmax(logits), 0.0, 1.0
    for p in sorted(probs, reverse=True):
        if mass < sampling.top_p:
            least = p
        mass += p
    return [x if p >= least else -math.inf for x, p in zip(logits, probs, strict=True)]


def slow_top_k(logits: Sequence[float], sampling: Sampling) -> list[float]:
    count = sampling.top_k or len(logits)
    border = sorted(logits, reverse=True)[min(count, len(logits)) - 1]
    return [x if x >= border else -math.inf for x in logits]


def slow_sample(probs: Sequence[float], uniform: float) -> int:
    """The first token whose cumulative mass exceeds u times the whole."""
    target, mass = uniform * sum(probs), 0.0
    for token, p in enumerate(probs):
        mass += p
        if mass > target:
            return token
    return max(t for t, p in enumerate(probs) if p > 0)


def slow_distinct(probs: Sequence[float], uniform: Sequence[float]) -> list[int]:
    """Draw one after the other, striking out what was drawn."""
    left, drawn = list(probs), []
    for u in uniform:
        token = slow_sample(left, u)
        left[token] = 0.0
        drawn.append(token)
    return drawn


def topk_tokens(probs: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(probs)), key=lambda t: -probs[t])[:count]


def full_mask(valid: Tensor, length: int) -> Tensor:
    """Visible entries of a whole sequence that begins with the condition: [R, T, T] bool."""
    seen = torch.cat([valid, valid.new_ones(len(valid), max(0, length - valid.shape[1]))], 1)[
        :, :length
    ]
    return prefix_mask(seen, torch.ones(length, length, dtype=torch.bool).tril())


def turned(config: TransformerConfig, valid: Tensor, length: int) -> Tensor:
    """Rotations of each row's slots; where positions are 1-D, pads do not count. [R, length, 2, hd / 2]"""
    table, rows = rope_table(config, length), []
    for row in valid.tolist():
        pads = row.count(False) if config.rope == "1d" else 0
        rows.append(torch.stack([table[max(slot - pads, 0)] for slot in range(length)]))
    return torch.stack(rows)


def features(target: Target, prefix: Tensor, valid: Tensor, tokens: Sequence[int]) -> Tensor:
    """The target's features [R, P + T, H] of a whole sequence in one pass without a cache."""
    embedded = target.embed(torch.tensor(list(tokens), dtype=torch.int64))
    x = torch.cat([prefix, embedded.expand(len(prefix), -1, -1)], 1)
    rope = turned(target.config, valid, x.shape[1])
    return target(x, rope, additive_mask(full_mask(valid, x.shape[1]), x.dtype))


def guesses(drafter: Drafter, hidden: Tensor, valid: Tensor, tokens: Sequence[int]) -> Tensor:
    """The drafter's guesses [R, E, H]; entry i takes hidden[:, i] and the token of slot i + shift."""
    config, entries = drafter.config, hidden.shape[1]
    ids = torch.tensor([0] * config.prefix + list(tokens))[drafter.shift :][:entries]
    rope = turned(config, valid, entries + 1)[:, 1:]
    mask = full_mask(torch.ones_like(valid) if drafter.sees_pads else valid, entries)
    return drafter(ids.expand(len(hidden), -1), hidden, rope, additive_mask(mask, hidden.dtype))


class Twin:
    """One image and its request. prefix [R, P, H] and valid [R, P]: its own rows."""

    def __init__(
        self,
        models: Models,
        request: Request,
        prefix: Tensor,
        valid: Tensor,
        rule: Relaxed | None = None,
    ) -> None:
        (self.target, self.drafter), self.request, self.rule = models, request, rule or Relaxed()
        self.prefix, self.valid = prefix, valid

    def probs(self, feature: Tensor) -> Probs:
        """[R, H] -> the probs of the next token."""
        logits = self.target.head(feature)
        if len(logits) == 2:
            logits = logits[1] + self.request.sampling.cfg_scale * (logits[0] - logits[1])
        order = self.target.config.top_p_first
        return slow_probs(logits.flatten().tolist(), self.request.sampling, order)

    def token(self, probs: Probs, uniform: float) -> int:
        return (
            topk_tokens(probs, 1)[0]
            if self.request.sampling.greedy
            else slow_sample(probs, uniform)
        )

    def target_probs(self, tokens: Sequence[int]) -> Probs:
        return self.probs(features(self.target, self.prefix, self.valid, tokens)[:, -1])

    def draft(
        self, tree: DraftTree, tokens: Sequence[int], uniform: Sequence[float]
    ) -> tuple[list[int], dict[int, Probs]]:
        """The tree's tokens and the drafter's q; tokens[-1] is the root."""
        known = features(self.target, self.prefix, self.valid, tokens[:-1])
        drafts, q, inputs = {0: tokens[-1]}, {}, {0: known}
        for node in tree.expanded:
            on_path = [drafts[n] for n in dict.fromkeys(tree.path_table[node]) if n]
            guess = guesses(self.drafter, inputs[node], self.valid, [*tokens, *on_path])
            probs = q[node] = self.probs(guess[:, -1])
            children = tree.children[node]
            if self.request.sampling.greedy:
                drawn = topk_tokens(probs, len(children))
            else:
                drawn = slow_distinct(probs, [uniform[child - 1] for child in children])
            for child, token in zip(children, drawn, strict=True):
                drafts[child] = token
                inputs[child] = torch.cat([inputs[node], guess[:, -1:]], 1)
        return [drafts[n] for n in range(tree.size)], q

    def grow(
        self, grown: DynamicTree, tokens: Sequence[int]
    ) -> tuple[DraftTree, list[int], list[int]]:
        """A dynamic tree, its tokens, and the age of each node: where two are equal the older one counts."""
        inputs: dict[tuple[int, ...], Tensor] = {
            (): features(self.target, self.prefix, self.valid, tokens[:-1])
        }

        def probs(path: tuple[int, ...]) -> Probs:
            if path not in inputs:
                above = inputs[path[:-1]]
                guess = guesses(self.drafter, above, self.valid, [*tokens, *path[:-1]])
                inputs[path] = torch.cat([above, guess[:, -1:]], 1)
            return self.probs(
                guesses(self.drafter, inputs[path], self.valid, [*tokens, *path])[:, -1]
            )

        found = dynamic_tree(probs, grown.top_k, grown.expansions, grown.drafts)
        ranks: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        for path in found:  # parents come first, siblings in order
            older = sum(other[:-1] == path[:-1] for other in ranks if other)
            ranks[path] = (*ranks[path[:-1]], older)
        tree = DraftTree.from_paths("grown", ranks.values(), draws=grown.top_k)
        back = {rank: path for path, rank in ranks.items()}
        paths = [back[rank] for rank in tree.paths]
        age = [found.index(path) + 1 if path else 0 for path in paths]
        return tree, [path[-1] if path else tokens[-1] for path in paths], age

    def step(self, tree: Tree, tokens: list[int], number: int) -> list[int]:
        """The tokens that one step adds."""
        most, together = tree.max_children, self.request.relaxation.verify == "block"
        count = tree.draws + (tree.size - 1 if together else tree.depth * most) + 1
        uniform = sampling.uniforms(self.request.seed, number, count).tolist()
        rest = uniform[tree.draws :]
        tries = [rest[depth * most : (depth + 1) * most] for depth in range(tree.depth)]
        q: dict[int, Probs] | None = None
        if isinstance(tree, DynamicTree):
            tree, drafts, age = self.grow(tree, tokens)
        else:
            drafts, q = self.draft(tree, tokens, uniform)
            age = list(range(tree.size))
        path = {
            n: [drafts[m] for m in dict.fromkeys(tree.path_table[n])][1:] for n in range(tree.size)
        }
        p = {n: self.target_probs(tokens + path[n]) for n in range(tree.size)}
        if self.request.sampling.greedy:
            node = self.deepest(tree, p, drafts, age)
            return path[node] + topk_tokens(p[node], 1)
        outcome: Outcome | None = None
        if together and q is not None:
            outcome = traverse(tree, p, q, drafts, rest, self.rule)
        outcome = outcome or walk(tree, p, q, drafts, tries, self.rule)
        probs = p[outcome.node] if outcome.residual is None else outcome.residual
        return path[outcome.node] + [self.token(probs, uniform[-1])]

    def deepest(
        self, tree: DraftTree, p: dict[int, Probs], drafts: Sequence[int], age: Sequence[int]
    ) -> int:
        """The end of the longest path whose drafts all win; of equally long ones the oldest."""
        won = {0}
        for node in range(1, tree.size):
            above = tree.parent[node]
            if above in won and wins(p[above], drafts[node], self.rule, tree.depths[above]):
                won.add(node)
        return max(won, key=lambda node: (tree.depths[node], -age[node]))

    @torch.no_grad()
    def decode(self, tree: Tree) -> list[int]:
        """The whole image."""
        first = float(sampling.uniforms(self.request.seed, 0, 1)[0])
        tokens, number = [self.token(self.target_probs([]), first)], 0
        while len(tokens) < self.target.config.tokens:
            number += 1
            tokens += self.step(tree, tokens, number)
        return tokens[: self.target.config.tokens]
