"""Engines for jobs that are not rows: each request is a set of inputs, each of which is computed in one pass."""
