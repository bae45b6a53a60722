"""Generation, the first kind of engine: its messages, scheduler and backend protocol."""
