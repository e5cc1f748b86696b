"""The ClientApp of flower-blsgd."""
