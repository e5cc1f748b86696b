"""Experiments: measure speeds, predict runs, compare algorithms, and report results."""
