"""`python -m lantern_hpu COMMAND ...`, the same as `lantern-hpu COMMAND ...`."""

from __future__ import annotations

import sys

from lantern_hpu.cli import main

sys.exit(main())
