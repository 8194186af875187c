"""lantern_hpu inside other libraries: `bridges.diffusers` and `bridges.transformers`."""
