"""Generation as a use case: from a client's prompt to deltas of text."""
