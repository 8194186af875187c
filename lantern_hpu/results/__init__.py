"""What a run reads and leaves: prompts, images with their metadata, tables."""
