"""What a model's layers call in place of what mlx-lm gave them, where a device is faster with it."""
