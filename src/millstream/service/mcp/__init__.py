"""MCP servers of the configuration file: their tools, and calls of them."""
