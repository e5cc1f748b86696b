"""Measurements. Each module runs alone: ``python -m benchmarks.NAME [--json FILE] [--quick]``."""
