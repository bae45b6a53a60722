"""Drafters: they propose the next tokens of rows, which the target model then verifies in one pass."""
