"""Chat templates: what they accept, the conversations that they get, and the process that runs them."""
