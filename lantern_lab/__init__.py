"""The wing that measures pictures: what methods draw, scored, and what relaxation costs."""
