"""The only room that imports MLX. Import its modules on an owner thread: importing them imports MLX."""
