"""Images, sounds and videos of requests: fetched, checked and brought into the form that a model takes. No MLX."""
