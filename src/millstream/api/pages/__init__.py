"""The web pages that the server itself serves: chat, dashboard and API reference."""
