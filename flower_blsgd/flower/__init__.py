"""Flower's types and internals: apps, calls of an app, and records of arrays."""
