"""From files to a model on its device."""
