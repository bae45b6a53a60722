"""Embeddings and reranking: texts in, vectors and scores out."""
