"""Penstock: a PyTorch input pipeline that keeps accelerators fed."""

__version__ = "0.1.0"
