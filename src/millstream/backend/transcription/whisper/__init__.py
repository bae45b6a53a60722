"""Whisper: encoder, decoder with batched KV caches, and its rules for timestamps."""
