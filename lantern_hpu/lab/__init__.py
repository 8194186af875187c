"""Everything that measures. Nothing outside this package and the commands imports it."""
