"""Grammars: their limits, sources and compilation, and those of tool calls."""
