"""Training: a drafter for any target, from prompts alone (`lantern-hpu train drafter`)."""
