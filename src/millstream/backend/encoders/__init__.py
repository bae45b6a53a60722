"""Encoder models: embeddings and rerankers, each input in one pass."""
