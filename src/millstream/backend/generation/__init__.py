"""The MLX backend of generation: a batch of rows that prefill and decode."""
