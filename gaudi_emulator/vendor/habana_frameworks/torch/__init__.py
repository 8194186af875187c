"""Flags are read, and the emulated modules put in place, while this is imported, as on a card."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("gaudi_emulator") is None:  # in a process that another folder's Python started
    sys.path.append(str(Path(__file__).resolve().parents[4]))

import gaudi_emulator
from gaudi_emulator.life import load

gaudi_emulator.install()
load()
