"""What a step is computed with, and what devices may have faster forms of: plain torch, one tensor at a time."""
