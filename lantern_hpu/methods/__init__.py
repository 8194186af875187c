"""What a decoding method is: the table of methods, and how acceptance may be relaxed."""
