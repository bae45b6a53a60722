"""Kokoro: StyleTTS 2 with an iSTFTNet vocoder. Written for few, large matmuls: see docs/architecture/speech.md."""
