"""From logits to tokens: sampling, penalties, grammar masks and log-probabilities, for all rows in one pass."""
