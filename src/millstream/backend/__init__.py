"""The MLX backends: the only package that imports MLX. Import its modules on an owner thread."""
