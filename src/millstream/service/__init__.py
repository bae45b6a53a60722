"""asyncio only: which engine, admission, one generation use case for every dialect, metrics."""
