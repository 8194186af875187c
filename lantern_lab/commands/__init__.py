"""Commands: options, one call, what is printed."""
