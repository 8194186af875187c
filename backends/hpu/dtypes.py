"""Number formats on a Gaudi card; `auto` takes the first."""

from __future__ import annotations

DTYPES = {
    "bfloat16": "what the matrix engines are made for",
    "float32": "exact comparisons with other devices hold; slower and twice the memory",
    "float16": "from Gaudi 2 on; bfloat16 has the wider range",
}
# An emulated card is there to be compared
EMULATED_DTYPES = {"float32": "an emulated card is held against other devices", **DTYPES}
