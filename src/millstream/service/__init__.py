"""The service layer, on asyncio: the hub of models, admission, the use cases that all dialects share, and metrics."""
