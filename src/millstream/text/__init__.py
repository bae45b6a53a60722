"""Text in and out of models: tokenizers, chat templates, tool calls, reasoning, stop strings, grammars. No MLX."""
