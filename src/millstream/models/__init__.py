"""Finds a model's files (folder, GGUF file, hub, demo package), checks them, and estimates its memory. No MLX."""
