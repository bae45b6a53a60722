"""HTTP/1.1 for strangers: uvicorn's protocol with limits on size, time and number."""
