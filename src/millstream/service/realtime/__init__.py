"""Realtime sessions: speech in as it is spoken, transcripts and spoken answers out. Knows no WebSocket."""
