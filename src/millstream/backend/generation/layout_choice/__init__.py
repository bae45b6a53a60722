"""Decides at load how a model runs on its device: its KV cache, its attention, and which fast paths it gets."""
