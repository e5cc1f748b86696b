"""A grid of worker processes on this machine, which share the memory of the models."""
