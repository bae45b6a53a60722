"""Engines that write down speech: messages, plan and scheduler."""
