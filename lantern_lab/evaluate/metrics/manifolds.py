"""Precision and recall: shares of pictures in the manifold of the other set (Kynkäänniemi et al. 2019)."""

from __future__ import annotations

import numpy as np

from lantern_lab.evaluate.statistics import Array, QualityMetric, mean_metric

NEIGHBOURS = 3


def precision() -> QualityMetric:
    """Of drawn pictures in the manifold of the reference."""
    return mean_metric("precision", "precision", "higher", 4)


def recall() -> QualityMetric:
    """Of reference pictures in the manifold of the drawn ones."""
    return mean_metric("recall", "recall", "higher", 4)


def manifold_rows(drawn: Array, real: Array) -> dict[str, Array]:
    """Rows of both, of VGG features [n, d] and [m, d]."""
    return {"precision": inside(drawn, real), "recall": inside(real, drawn)}


def inside(points: Array, others: Array) -> Array:
    """[n] 1 where a point [n, d] is as near to one of the others [m, d] as that one's third neighbour among them."""
    import torch

    a, b = (torch.from_numpy(np.ascontiguousarray(x)) for x in (points, others))
    reach = torch.cat(
        [torch.cdist(part, b).kthvalue(NEIGHBOURS + 1).values for part in b.split(1000)]
    )  # [m]; a point's own distance of 0 counts as the first
    hits = [(torch.cdist(part, b) <= reach).any(1) for part in a.split(1000)]
    return np.asarray(torch.cat(hits).double().numpy())
