"""What all tests share; the tiny model is in `tiny.py`, the slow twin of the decoder in `twin.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only cost

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def all_cores() -> Iterator[None]:
    """For tests of the embedded model, whose tensors are not tiny."""
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)
