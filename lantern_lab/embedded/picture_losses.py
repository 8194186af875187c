"""What a tokenizer's decoder learns from: pixels, edges, texture, a perceptual distance, and a patch discriminator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_lab.evaluate.attributes import Classifier


def picture_loss(drawn: Tensor, real: Tensor) -> Tensor:
    """L1 and L2 on pixels, the same on hue, L1 on differences of neighbours at three scales, and texture.

    The differences keep edges sharp. Without the term on hue, a small codebook spends its codes on
    brightness first and draws green as grey for the first thousand steps. Texture asks for as much roughness as
    there was, wherever its strokes may lie: the other terms would rather have none than misplace one.
    """
    error = drawn - real  # [B, 3, H, W]
    hue = error - error.mean(dim=1, keepdim=True)  # [B, 3, H, W]
    loss = error.abs().mean() + error.square().mean()
    loss = loss + hue.abs().mean() + 2 * hue.square().mean()
    for _ in range(3):
        loss = loss + 0.5 * error.diff(dim=-1).abs().mean() + 0.5 * error.diff(dim=-2).abs().mean()
        error = F.avg_pool2d(error, 2)
    return loss + 0.25 * (roughness(drawn) - roughness(real)).abs().mean()


def roughness(x: Tensor) -> Tensor:
    """The size of differences between neighbours, over 4 x 4 pixels: [B, 3, H, W] -> [B, 3, H / 4, W / 4]."""
    across, down = x.diff(dim=-1)[..., :-1, :], x.diff(dim=-2)[..., :-1]
    return (F.avg_pool2d(across.square() + down.square(), 4, ceil_mode=True) + 1e-4).sqrt()


class PerceptualLoss(nn.Module):
    """Distance of two pictures in the feature maps of the network that names what painted pictures show.

    As LPIPS without its learnt weights: at each layer the squared distance of features of length 1, averaged over
    places. The network is convolutional, so pictures of any size fit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = Classifier.load().net

    def maps(self, pixels: Tensor) -> list[Tensor]:
        """[B, 3, H, W] to the maps after the stem and each stage, [B, C, h, w] of length 1 over C."""
        x = F.relu(self.net.stem(pixels))
        found = [x]
        for stage in self.net.stages:
            x = stage(x)
            found.append(x)
        return [F.normalize(one, dim=1, eps=1e-3) for one in found]

    def forward(self, drawn: Tensor, real: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.maps(real)
        pairs = zip(self.maps(drawn), wanted, strict=True)
        return torch.stack([(a - b).square().sum(1).mean() for a, b in pairs]).mean()


class PatchDiscriminator(nn.Module):
    """Whether each patch of a picture, about 40 pixels wide, was painted or decoded."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for inside in (width, 2 * width):
            layers += [
                nn.Conv2d(inside, 2 * inside, 4, 2, 1),
                nn.GroupNorm(8, 2 * inside),
                nn.LeakyReLU(0.2),
            ]
        self.layers = nn.Sequential(*layers, nn.Conv2d(4 * width, 1, 3, padding=1))

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] in [-1, 1] to scores [B, 1, H / 8, W / 8], above 0 where it looks painted."""
        scores: Tensor = self.layers(pixels)
        return scores

    def loss(self, drawn: Tensor, real: Tensor) -> Tensor:
        """Its hinge loss: scores of painted patches should be above 1, of decoded ones below -1."""
        return 0.5 * (F.relu(1 - self(real)).mean() + F.relu(1 + self(drawn)).mean())


def balanced(
    loss: Tensor, adversarial: Tensor, drawn: Tensor, last: Tensor, share: float
) -> Tensor:
    """The gradient of loss + weight * adversarial by the pictures drawn.

    The weight is VQGAN's: it makes the adversarial gradient at the decoder's last weights `share` times as large
    as that of the other losses.
    """
    (ours,) = torch.autograd.grad(loss, drawn, retain_graph=True)
    (theirs,) = torch.autograd.grad(adversarial, drawn)
    norms = [
        torch.autograd.grad(drawn, last, gradient, retain_graph=True)[0].norm()
        for gradient in (ours, theirs)
    ]
    return ours + (share * norms[0] / (norms[1] + 1e-6)).clamp(max=1e4) * theirs
