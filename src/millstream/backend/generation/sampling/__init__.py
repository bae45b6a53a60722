"""From logits to tokens: for rows of any settings, in one pass."""
