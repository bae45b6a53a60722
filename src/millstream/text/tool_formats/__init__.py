"""Tool-call formats: one module per format, and a registry that detects which one a model uses."""
