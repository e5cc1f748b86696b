"""Data sets: their sources, and their conversion to arrays that processes share."""
