"""Loading weights: from files to a model on its device."""
