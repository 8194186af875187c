"""What a user types: one file a command, with its options, one call, and what it prints."""
