"""Millstream: an inference server for MLX."""

__version__ = "0.1.0"
