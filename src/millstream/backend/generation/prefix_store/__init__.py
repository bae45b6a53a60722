"""What is kept of rows for later prompts, and how it travels to a disk and back."""
