"""Speculative decoding, as far as it needs no model: how deep each row should speculate."""
