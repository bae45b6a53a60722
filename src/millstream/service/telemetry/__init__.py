"""OpenTelemetry spans of requests. An extra: nothing here is imported unless traces are asked for."""
