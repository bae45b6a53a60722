"""Replacements for layers and functions of mlx-lm's models, where a device runs them faster."""
