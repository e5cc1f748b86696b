"""Biased local SGD as a Flower strategy: what the server does in a run."""
