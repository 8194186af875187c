"""What drawing is worth: which drafts are accepted, and how far a method moves the model's own choice."""
