"""The ServerApp of flower-blsgd."""
