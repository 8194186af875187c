"""The loss: how far the drafter's probabilities are from the target's, several drafts deep.

The target runs over a finished image once, with guidance both rows of it; its features h and its probabilities p at
every token are what the drafter is to guess. Pass 1 of the drafter reads the target's features, pass d the guesses of
pass d - 1. One pass drafts at every place of the image at once, and each place attends to what it would attend to in
a tree: the target's features up to d - 1 entries before it, then the entries of passes 2 .. d of its own path (the
training-time test of EAGLE-3, arXiv 2503.01840). What counts is the share of drafts that get accepted,
which for a drawn draft is sum min(p, q) (Leviathan et al. 2023); its gradient is poor where p and q do not meet, so
cross-entropy and the distance of the features help.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode.common import make_grammar, sampling_params
from lantern_hpu.errors import Arg, OptionError, WeightsError, words
from lantern_hpu.files import sha256, write_file
from lantern_hpu.methods.request import in_turn
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.model import ImageModel
from lantern_hpu.models.transformer import Drafter, Rotary, Target
from lantern_hpu.ops.buffers import additive_mask, causal_mask, prefix_mask
from lantern_hpu.ops.kv_cache import GrowingCache
from lantern_hpu.ops.sampling import apply_guidance, to_probs
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.outputs import read_arrays
from lantern_hpu.tree import DraftTree

if TYPE_CHECKING:
    from accelerate import Accelerator

# ------------------------------------------------------------------------------------ what a drafter learns from

FEWEST = 10  # different prompts: some are held out
HELD_OUT = 0.1  # share of the prompts


@dataclass
class Samples:
    """Images as tokens, with their prompts."""

    tokens: Tensor  # [n, N] int64
    prompts: list[str]  # [n]
    file: str = ""  # checksum of the file that some came from, if any did

    def __add__(self, other: Samples) -> Samples:
        tokens = torch.cat([self.tokens, other.tokens])
        return Samples(tokens, self.prompts + other.prompts, self.file or other.file)


def split(prompts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Prompts to learn from, and prompts to measure with: by the prompt itself, in any order."""
    different = sorted(set(prompts), key=lambda text: hashlib.sha256(text.encode()).digest())
    if len(different) < FEWEST:
        why = f"{len(different)} different ones; {FEWEST} are needed, as some are held out"
        raise OptionError("too few prompts", why, words(Arg("data"), "with more of them"))
    held = max(1, round(HELD_OUT * len(different)))
    return different[held:], different[:held]


def samples_key(
    pipeline: LanternPipeline, prompts: Sequence[str], sampling: Sampling, seed: int
) -> str:
    """What samples depend on: samples of another target or other settings would teach the wrong probabilities."""
    files = {name: digest for name, digest in pipeline.model.files.items() if "drafter" not in name}
    what = [files, list(prompts), asdict(sampling), seed]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def draw_samples(
    pipeline: LanternPipeline,
    prompts: Sequence[str],
    count: int,
    folder: Path,
    accelerator: Accelerator,
    batch: int = 8,
    seed: int = 0,
) -> Samples:
    """`count` images of these prompts in turn, drawn without drafts; kept in `folder`, a file a batch.

    Files of an interrupted run are used again; several processes share the batches.
    """
    sampling = pipeline.model.sampling
    # Every file is full, so that more samples can be asked for later.
    whole = -(-count // batch) * batch
    requests = in_turn(prompts, range(whole), seed, sampling)
    files = {folder / f"{start:06d}.npz": start for start in range(0, count, batch)}
    stamp = samples_key(pipeline, prompts, sampling, seed)
    # Shared out before looking what is there: all processes must see the same list.
    share = list(files)[accelerator.process_index :: accelerator.num_processes]
    mine = [file for file in share if not file.exists()]
    shown = tqdm(mine, desc="samples", unit="batch", disable=not accelerator.is_main_process)
    for file in shown:
        tokens = draw_batch(pipeline, requests[files[file] : files[file] + batch])
        content = io.BytesIO()
        np.savez(content, tokens=tokens.astype(np.int32), key=np.array(stamp))
        write_file(file, content.getvalue())
    accelerator.wait_for_everyone()
    config = pipeline.model.target.config
    none = np.zeros((0, config.tokens), np.int64)
    rows = np.concatenate([none, *(read_samples(file, stamp, batch, config) for file in files)])
    return Samples(torch.from_numpy(rows[:count]), [r.prompt for r in requests[:count]])


def read_samples(
    file: Path, stamp: str, images: int, config: TransformerConfig
) -> NDArray[np.int64]:
    """Tokens [images, N] of a file with this key."""
    saved = read_arrays(file)
    if str(saved.get("key")) != stamp:
        why = "it was drawn by another target, or from other prompts or settings"
        raise WeightsError(f"{file} cannot be used", why, words("another", Arg("output")))
    return checked_rows(saved.get("tokens", np.zeros(0)), images, config, file)


def checked_rows(
    tokens: NDArray[Any], images: int, config: TransformerConfig, file: Path
) -> NDArray[np.int64]:
    """Tokens [images, N] of a file; an OptionError where they are not the model's."""
    what = f"{file} does not fit the model"
    shape = (images, config.tokens)
    codes = config.vocab_size
    if tokens.shape != shape or tokens.dtype.kind not in "iu":
        why = f"{tokens.dtype} {list(tokens.shape)} for {images} images"
        raise OptionError(what, why, f"integers {list(shape)}")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < codes:
        why = f"tokens from {tokens.min()} to {tokens.max()}"
        raise OptionError(what, why, f"0 to {codes - 1}")
    return tokens.astype(np.int64)


def read_encoded(file: Path, config: TransformerConfig, held_out: Sequence[str]) -> Samples:
    """Captioned pictures as the model's tokenizer encodes them, without those of held-out captions: from a .npz with
    `tokens` [n, N] integers and `captions` [n] strings."""
    saved = read_arrays(file)
    if not {"tokens", "captions"} <= saved.keys():
        hint = "an .npz with tokens [n, N] and captions [n]"
        raise OptionError(f"cannot read tokens from {file}", f"it holds {sorted(saved)}", hint)
    captions = [str(caption) for caption in np.atleast_1d(saved["captions"])]
    tokens = checked_rows(saved["tokens"], len(captions), config, file)
    kept = [i for i, caption in enumerate(captions) if caption not in held_out]
    rows = torch.from_numpy(tokens[kept])
    return Samples(rows, [captions[i] for i in kept], sha256(file))


def draw_batch(pipeline: LanternPipeline, part: list[Request]) -> NDArray[np.int64]:
    """Tokens [b, N] of these requests."""
    engine = pipeline.engines.get(pipeline.spec(part, DraftTree.root_only(), len(part)))
    pipeline.warm_up(engine, part[0])
    return np.stack([record.token_ids for record in pipeline.draw_batch(engine, part)])


# ------------------------------------------------------------------------------------ the loss

CROSS, FEATURE = 0.3, 0.2  # weights of cross-entropy and feature distance; 1 - overlap has 1


class Lesson:
    """A batch of images as the target has them: what the drafter reads, and what it is to guess.

    N tokens, P prefix positions; entry i of T = P + N - 2 holds the feature of position i and the token of i + 1.
    """

    def __init__(
        self,
        model: ImageModel,
        prompts: Sequence[str],
        tokens: Tensor,
        aux_layers: Sequence[int] = (),
    ) -> None:
        """Of tokens [B, N] int64, all of an image's or the first; `aux_layers` as in `DrafterConfig`."""
        target, sampling, config = model.target, model.sampling, model.target.config
        self.guidance = sampling.cfg_scale != 1
        settings = [sampling] * len(tokens)
        self.params = sampling_params(settings, config.vocab_size, tokens.device)
        grammar = make_grammar(config)
        self.grammar = None if grammar is None else grammar.to(tokens.device)
        requests = list(map(Request, prompts))
        prefix, valid, words, _ = model.condition.rows(requests, self.guidance)
        rows = tokens.repeat(2, 1) if self.guidance else tokens  # [R, N]
        length = config.prefix + tokens.shape[1] - 1
        position = torch.arange(length, device=valid.device).expand(len(valid), -1)
        rotary = Rotary(config, length).to(valid.device)
        rope = rotary(position, (~valid).sum(1)).to(
            tokens.device, prefix.dtype
        )  # [R, P + N - 1, ..]
        valid = F.pad(valid, (0, tokens.shape[1] - 1), value=True)  # [R, P + N - 1]
        causal = causal_mask(length).to(tokens.device)
        # The entry that holds token 0, from which the loss counts
        self.first = config.prefix - 1
        with torch.no_grad():
            x = torch.cat([prefix, target.embed(rows[:, :-1])], 1)
            mask = additive_mask(prefix_mask(valid, causal), x.dtype)
            is_word = target.words(torch.cat([words.to(rows.dtype), rows[:, :-1]], 1))
            # [R, P + N - 1, F]
            hidden = target(x, rope, mask, aux_layers=aux_layers, words=is_word)
            logits = self.allowed(target.head(hidden[:, self.first + 1 :, : config.dim]), 1)
            guided = apply_guidance(logits, self.params, self.guidance)
            # [B, N - 1, V], of tokens 1, 2, ...
            most = sampling.top_k if sampling.top_k < config.vocab_size else 0
            filters = (most, sampling.top_p < 1, config.top_p_first)
            self.p = to_probs(guided, self.params, *filters)
        read = hidden.float()  # the drafter learns in float32
        self.features = read[:, :-1]  # [R, T, F]
        self.hidden = read[..., : config.dim]  # [R, T + 1, H]
        self.valid = valid[:, :-1]  # [R, T]
        self.causal = causal[:-1, :-1]  # [T, T]
        self.tokens = torch.cat([words[:, 1:].to(rows.dtype), rows[:, :-1]], 1)  # [R, T]
        self.rope = rope[:, 1:].float()  # [R, T, 2, hd / 2]

    def allowed(self, logits: Tensor, first: int) -> Tensor:
        """Logits [R, T, V] of tokens `first`, `first` + 1, ... without what may not stand there."""
        if self.grammar is None:
            return logits
        place = torch.arange(first, first + logits.shape[1], device=logits.device)
        return self.grammar(logits, place.expand(len(logits), -1))

    def mask(self, drafter: Drafter, level: int) -> Tensor:
        """[R, 1, T, (l + 1) * T] what entries of pass l, from 0, attend to in this pass and those before."""
        mask = self.causal.expand(len(self.valid), -1, -1)
        if not drafter.sees_pads:
            mask = prefix_mask(self.valid, self.causal)
        own = torch.ones_like(self.causal)
        passes = [mask & own.tril(-level)]
        # Of pass k an entry sees the one that stands as far before it as there are passes between
        passes += [own.tril(back).triu(back).expand_as(mask) for back in range(1 - level, 1)]
        return additive_mask(torch.cat(passes, -1), self.hidden.dtype)


class Unrolled(nn.Module):
    """The drafter with its loss, as one module: several processes then share its gradients."""

    def __init__(self, drafter: Drafter, target: Target, depth: int) -> None:
        """Of `depth` passes; the target's head is used, and not trained."""
        super().__init__()
        self.drafter, self.depth = drafter, depth
        # Not a submodule: its weights are not trained.
        self.logits: Callable[[Tensor], Tensor] = lambda x: target.head(x.to(target.dtype))

    def forward(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """The loss [], and the overlap of each pass [depth]."""
        losses, overlaps = [], []
        source, cache = lesson.features, GrowingCache()
        for level in range(self.depth):
            mask = lesson.mask(self.drafter, level)
            guess = self.drafter(lesson.tokens, source, lesson.rope, mask, cache)
            loss, overlap = self.compare(guess, lesson, level)
            losses.append(loss)
            overlaps.append(overlap)
            # Entry i of the next pass reads the guess at i - 1; nothing reads its entries of the condition.
            source = F.pad(guess[:, :-1], (0, 0, 1, 0))
        return torch.stack(losses).mean(), torch.stack(overlaps).detach()

    def compare(self, guess: Tensor, lesson: Lesson, level: int) -> tuple[Tensor, Tensor]:
        """Loss and overlap [] of one pass; its entries rest on `level` true tokens after a true feature."""
        first = lesson.first + level
        logits = lesson.allowed(self.logits(guess[:, first:]), level + 1)
        guided = apply_guidance(logits, lesson.params, lesson.guidance)
        log_q = (guided / lesson.params.temperature[:, None, None]).log_softmax(-1)
        p = lesson.p[:, level:]
        overlap = torch.minimum(p, log_q.exp()).sum(-1).mean()
        cross = -(p * log_q).sum(-1).mean()
        goal = lesson.hidden[:, first + 1 :]
        feature_loss = F.smooth_l1_loss(guess[:, first:].float(), goal.float())
        return CROSS * cross + (1 - overlap) + FEATURE * feature_loss, overlap
