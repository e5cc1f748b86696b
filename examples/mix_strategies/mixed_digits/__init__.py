"""Combinations of parts of this library and of Flower."""
