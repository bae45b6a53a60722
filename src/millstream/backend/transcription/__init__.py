"""Transcription models on MLX."""
