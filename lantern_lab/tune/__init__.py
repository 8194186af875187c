"""Tuning: the static draft tree that draws fastest with a model on a device."""
