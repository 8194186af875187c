"""Trains the model that the package holds, and the network that scores its pictures; see docs/embedded-model.md."""
