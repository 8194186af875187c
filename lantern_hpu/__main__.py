"""`python -m lantern_hpu COMMAND ...`, the same as `lantern-hpu COMMAND ...`."""

from __future__ import annotations

import sys

from lantern_hpu.cli import main

if __name__ == "__main__":  # and not in a process that this one starts
    sys.exit(main())
