"""Heads for multi-token prediction that models bring along, as drafters."""
