"""Fetches, checks, decodes and preprocesses the images, audio and videos of requests. No MLX.

Code here runs on worker threads, never on the event loop: it may block on sockets, child processes and futures.
"""
