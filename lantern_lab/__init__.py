"""Measures pictures: what methods draw, scored, and what relaxation costs."""
