"""Fetches and preprocesses the media of requests without blocking the event loop, within a memory budget."""
