"""A load generator for any OpenAI-compatible server: ours or a peer's. Knows nothing of the rest of Millstream."""
