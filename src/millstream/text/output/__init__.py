"""What a model wrote: reasoning, content and tool calls, told apart while the text arrives."""
