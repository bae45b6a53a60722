"""Loads models: finds and checks their files, reserves memory, and starts their engines."""
