"""Intel Gaudi, and the emulator that stands in for one."""
