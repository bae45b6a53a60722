"""Reading prompts, chunk by chunk, before their rows join the batch."""
