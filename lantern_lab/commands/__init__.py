"""Commands of the wing: options, one call, what is printed."""
