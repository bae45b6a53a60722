"""Kernels of our own for CUDA. Each says beside it what it stands for and why MLX has no better way."""
