"""Speech as a use case: a text in, sound out, sentence by sentence."""
