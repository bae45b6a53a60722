"""From a model's name to a model that serves: find its files, check them, reserve memory, start its engine."""
