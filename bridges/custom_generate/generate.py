"""Images of transformers' autoregressive models, several tokens a step: all of it is in the package lantern_hpu."""

from lantern_hpu.bridges.transformers import from_hub


def generate(model, **arguments):
    return from_hub(model, **arguments)
