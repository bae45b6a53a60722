"""The prefix cache: which KV blocks and checkpoints are saved, matched and evicted."""
