"""The text generation use case: turns a client's prompts into streamed deltas of text."""
