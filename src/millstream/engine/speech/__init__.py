"""Engines that speak: each request is a text in pieces, and each piece becomes sound."""
