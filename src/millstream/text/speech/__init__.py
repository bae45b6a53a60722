"""Text for speech models: normalisation, sentences, phonemes and voices."""
