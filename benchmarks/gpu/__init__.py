"""Checks on a machine with a GPU, in two calls that each end within their limit."""
