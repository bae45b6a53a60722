"""OpenAI's audio routes."""
