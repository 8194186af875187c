"""Programs of developers, by purpose: each runs as `python -m scripts.FOLDER.NAME` from the repository."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
