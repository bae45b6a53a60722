"""Prefill: prompts run chunk by chunk into caches of their own, before their rows join the batch."""
