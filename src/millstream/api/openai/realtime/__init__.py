"""/v1/realtime: speech in and out over a WebSocket, with OpenAI's events."""
