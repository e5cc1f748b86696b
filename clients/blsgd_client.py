"""The ClientApp of flower-blsgd, see `flower_blsgd.client_app`."""

from flower_blsgd.client_app import app

__all__ = ["app"]
