"""HTTP/1.1 for untrusted clients: uvicorn's protocol with limits on size, time and number of connections."""
