"""A load generator for any OpenAI-compatible server. It uses HTTP only and no other part of Millstream."""
