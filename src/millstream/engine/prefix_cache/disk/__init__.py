"""The disk tier of the prefix cache."""
