"""Stands in for the vendor's package: see `gaudi_emulator`."""
