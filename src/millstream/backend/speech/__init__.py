"""Speech models in MLX: text or phonemes in, samples out."""
