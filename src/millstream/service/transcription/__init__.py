"""Transcription and translation of speech as use cases."""
