"""Number formats that a device may offer; which ones it does, and which `auto` takes, is in `<device>/dtypes.py`."""

from __future__ import annotations

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}  # of a number
QUANTIZED = ("int8",)  # smaller formats for the target's weights
