"""Media on their way into a model."""
