"""The command ``blsgd``."""
