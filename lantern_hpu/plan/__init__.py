"""The `plan` command: whether a model fits on a device."""
