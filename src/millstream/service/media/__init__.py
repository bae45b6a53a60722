"""Media of requests: fetched, decoded, and held within a memory budget."""
