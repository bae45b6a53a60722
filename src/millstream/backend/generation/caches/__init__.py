"""The KV caches of the batch, and of prompts in prefill."""
