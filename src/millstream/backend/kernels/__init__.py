"""CUDA kernels. Each module says what its kernel computes, and why MLX has no better way."""
