"""Checkpoints: the training state of a run, and its files."""
