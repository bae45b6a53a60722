"""The arrays behind the prefix cache: saved KV blocks and checkpoints, and their export to disk and back."""
