"""NVIDIA cards."""
