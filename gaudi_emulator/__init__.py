"""A stand-in for Gaudi's PyTorch software, so that wrong code fails on a laptop.

    python -m gaudi_emulator script.py            a program that imports habana_frameworks.torch
    python -m gaudi_emulator --bridge 1.19 -m MODULE

    import gaudi_emulator
    card = gaudi_emulator.install()               the same from within a program
    import habana_frameworks.torch as ht
    ...
    gaudi_emulator.warmed_up()                    from here on a compilation is an error
    print(card.findings.sorted(), card.counts)

It is written from the public sources of the PyTorch bridge, releases 1.19 and 1.24 (`releases.py`), and Habana's
documentation. Tensors say `hpu` and keep their numbers on the CPU; lazy graphs, recipes, HPU graphs, int32 storage,
fallbacks, host reads and the metrics follow the bridge. It knows nothing of speed, fusion, bfloat16 rounding or tie
order: what passes here is contract-checked, not tested on a Gaudi. Importing this loads no torch.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gaudi_emulator.device import Device


def install(
    release: str | None = None, lazy: bool | None = None, flags: Mapping[str, str] | None = None
) -> Device:
    """Put `habana_frameworks` in place for this process and those that it starts. -> the card

    A second call returns the card that is there.

    Args:
        release: of the bridge; the newest that was read if not given.
        lazy: PT_HPU_LAZY_MODE; what the flag says when the software is imported if not given.
        flags: other flags of the bridge, set in the environment.
    """
    from gaudi_emulator.device import current, listening

    if not listening():
        stack = ExitStack()
        atexit.register(stack.close)
        stack.enter_context(emulate(release, lazy, flags))
    return current()


def emulate(
    release: str | None = None, lazy: bool | None = None, flags: Mapping[str, str] | None = None
) -> AbstractContextManager[Device]:
    """The same for a while, for tests: the environment, `sys.modules` and torch are as before when it ends.

    Raises:
        EmulatorError: there is no such release.
    """
    from gaudi_emulator.life import emulated
    from gaudi_emulator.releases import release_named

    if release is not None:
        release_named(release)
    return emulated(release, lazy, flags)


def warmed_up() -> None:
    """For programs: every shape has occurred, so that a compilation is an error. Without the emulator: nothing."""
    device = sys.modules.get("gaudi_emulator.device")
    if device is not None and device.listening():
        device.current().warmed_up()
