"""Grids for any Flower app: pinned processes on this machine, and streams to SuperNodes."""
