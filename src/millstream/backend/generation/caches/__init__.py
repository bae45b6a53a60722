"""Keys and values of the rows that decode together, and of prompts that are being read."""
