"""Train the embedded model's drafter on the target's own samples at the default sampling settings.

    python scripts/train_drafter.py --data-dir data --minutes 18

needs `target.safetensors`, `tokenizer.safetensors`, `codes.npz` and `words.json`; writes
`drafter.safetensors`. First the target draws images of training captions (kept in `samples.npz`); then the
drafter learns, on paired conditional and unconditional rows, the law that guidance makes of them. Each batch
is unrolled: from the second pass on the drafter reads its own guesses, as it does inside a tree. Saved
weights are those with the highest measured overlap with the target on held-out samples, where overlap = sum
of min(p, q) = the chance that one sampled draft is accepted.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from drawing import draw, load_target
from icons import write_atomic, write_npz
from safetensors.torch import save
from torch import Tensor
from train_target import Captions, TextToImage, attention
from training import Masters, Run, parse

from lantern_hpu.config import Sampling
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.transformer import additive, prefix_mask


def sample(
    model: TextToImage, data: Captions, count: int, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Images drawn by the target for random training captions: codes [n, N] and word ids [n, P]."""
    generator = torch.Generator().manual_seed(1)
    ids = data.ids[data.train[torch.randint(len(data.train), (count,), generator=generator)]]
    return draw(model, ids, sampling), ids


class Trainer:
    """Drafter, frozen target, samples."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.sampling = Sampling(arguments.cfg_scale, arguments.temperature)
        torch.manual_seed(arguments.seed)
        self.model = load_target(arguments.data_dir)
        self.codes, self.ids = self.samples()
        self.held = max(16, len(self.codes) // 20)
        self.drafter = Drafter(self.model.target.config, attention=attention)
        self.start_from_target()
        self.model.bfloat16()
        masters = Masters(self.drafter, decay=0.01, clip=0.5, average=0.99)
        folder = arguments.data_dir / "runs" / "drafter"
        self.run = Run(folder, masters, arguments.minutes, arguments.lr, 50, arguments.seed)

    def samples(self) -> tuple[Tensor, Tensor]:
        """Drawn once for a target and its settings, and kept."""
        file = self.arguments.data_dir / "samples.npz"
        weights = (self.arguments.data_dir / "target.safetensors").read_bytes()
        # What the samples depend on: samples of another target or guidance would train the wrong law.
        key = f"{hashlib.sha256(weights).hexdigest()} {self.sampling} {self.arguments.samples}"
        if not file.exists() or str(np.load(file)["key"]) != key:
            data = Captions(self.arguments.data_dir, self.model.words)
            codes, ids = sample(self.model, data, self.arguments.samples, self.sampling)
            write_npz(
                file, codes=codes.numpy().astype(np.int16), ids=ids.numpy(), key=np.array(key)
            )
        saved = np.load(file)
        return torch.from_numpy(saved["codes"].astype(np.int64)), torch.from_numpy(saved["ids"])

    def start_from_target(self) -> None:
        """The target's embedding and last block; fc passes the feature on and adds a little embedding."""
        target, drafter = self.model.target, self.drafter
        with torch.no_grad():
            drafter.embed.weight.copy_(target.embed.weight)
            last = {
                name: value
                for name, value in target.layers[-1].state_dict().items()
                if not name.startswith("attention_norm")
            }
            drafter.block.load_state_dict(last)
            dim = target.config.dim
            drafter.fc.weight.normal_(std=0.02)
            drafter.fc.weight[:, dim:] += torch.eye(dim)
            drafter.fc.bias.zero_()

    def features(self, codes: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The target's hidden states of both rows of each image [2B, P + N - 1, H], and valid slots."""
        both, words = torch.cat([codes, codes]), torch.cat([ids, ids])
        uncond = torch.arange(len(both)) >= len(codes)
        with torch.no_grad():
            hidden = self.model.hidden(words, both, uncond)
        valid = F.pad(words > 0, (0, codes.shape[1] - 2), value=True)
        return hidden, valid

    def guided(self, hidden: Tensor) -> Tensor:
        """Logits after guidance and temperature [B, T, V] float32."""
        conditional, unconditional = self.model.target.head(hidden).float().chunk(2)
        guided = unconditional + self.sampling.cfg_scale * (conditional - unconditional)
        return guided / self.sampling.temperature

    def passes(self, codes: Tensor, ids: Tensor, depth: int) -> tuple[list[Tensor], list[Tensor]]:
        """Loss and overlap [] of each unrolled pass."""
        prefix = self.model.words.prefix
        hidden, valid = self.features(codes, ids)
        mask = additive(prefix_mask(valid, self.model.causal[:-1, :-1]), hidden.dtype)
        filler = torch.zeros(len(codes), prefix - 1, dtype=torch.int64)
        tokens = torch.cat([filler, codes[:, :-1]], 1).repeat(2, 1)  # [2B, P + N - 2]
        rope = self.model.rope[1:].expand(len(tokens), -1, -1, -1)
        goal = hidden[:, 1:]
        with torch.no_grad():
            p = self.guided(goal[:, prefix - 1 :]).softmax(-1)
        source = hidden[:, :-1]
        losses, overlaps = [], []
        for level in range(depth):
            guess = self.drafter(tokens, source, rope, mask)
            # Entry i of pass d rests on d true tokens after its last true feature.
            first = prefix - 1 + level
            log_q = self.guided(guess[:, first:]).log_softmax(-1)
            law = p[:, level:]
            near = F.smooth_l1_loss(guess[:, first:].float(), goal[:, first:].float())
            overlap = torch.minimum(law, log_q.exp()).sum(-1).mean()
            cross = -(law * log_q).sum(-1).mean()
            losses.append(0.3 * cross + (1 - overlap) + 0.2 * near)
            overlaps.append(overlap.detach())
            source = torch.cat([hidden[:, :1], guess[:, :-1]], 1)
        return losses, overlaps

    def gradients(self) -> float:
        """One step's overlap of the first pass, after the backward pass over all of them."""
        count, batch = len(self.codes) - self.held, self.arguments.batch
        picked = torch.randint(count, (batch,), generator=self.run.generator)
        losses, overlaps = self.passes(self.codes[picked], self.ids[picked], self.arguments.unroll)
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        return overlaps[0].item()

    @torch.no_grad()
    def measure(self) -> list[float]:
        """Overlap of each pass on held-out samples, with the averaged weights."""
        rows = []
        with self.run.masters.averaged():
            for part in torch.arange(len(self.codes) - self.held, len(self.codes)).split(4):
                _, overlaps = self.passes(self.codes[part], self.ids[part], self.arguments.unroll)
                rows.append(torch.stack(overlaps))
        return [float(x) for x in torch.stack(rows).mean(0)]

    def milestone(self) -> str:
        """Measure, and save the weights if they overlap more than any before."""
        overlaps = self.measure()
        if sum(overlaps) > self.run.best:
            self.run.best = sum(overlaps)
            weights = save(self.run.masters.named_average())
            write_atomic(self.arguments.data_dir / "drafter.safetensors", weights)
        return "held out by pass " + ", ".join(f"{x:.3f}" for x in overlaps)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded model's drafter.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--minutes", type=float, default=18.0)
    parser.add_argument("--samples", type=int, default=1536, help="images the target draws")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--unroll", type=int, default=2, help="passes a batch; later ones read own guesses"
    )
    parser.add_argument("--cfg-scale", type=float, default=2.5)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parse(parser)
    trainer = Trainer(arguments)
    if arguments.resume:
        trainer.run.resume()
    trainer.run.train(trainer.gradients, trainer.milestone, "overlap")


if __name__ == "__main__":
    main()
