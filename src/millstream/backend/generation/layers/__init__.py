"""Layers that know the KV cache of a batch: attention over slots, fused transformer blocks."""
