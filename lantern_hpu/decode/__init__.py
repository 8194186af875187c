"""Decoding: one captured step over one dataclass of preallocated tensors, and the loop around it."""
