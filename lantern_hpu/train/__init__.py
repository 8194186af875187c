"""Training: a drafter for any target, from prompts alone (`python -m lantern_hpu.train drafter`)."""
