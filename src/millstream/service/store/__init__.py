"""What clients may ask for again: stored records, and text that only this server can read."""
