"""What all tests share; the tiny model is in `tiny.py`, the slow twin of the decoder in `twin.py`."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only cost

import torch

torch.set_num_threads(1)
