"""Read the configuration again while the server runs: what the models are now, and what only a restart changes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from millstream.cli.serve_options import OPTIONS
from millstream.cli.settings import ServeConfig, resolve_config
from millstream.config import ConfigUpdate
from millstream.errors import ModelError


class Reread:
    """Reads files: not for the event loop."""

    def __init__(
        self, arguments: argparse.Namespace, running: ServeConfig, environment: Mapping[str, str] = os.environ
    ) -> None:
        """`running`: what the server was started with, and keeps but for its models."""
        self._arguments = arguments
        self._running = running
        self._environment = environment

    def __call__(self) -> ConfigUpdate:
        """Raises `ModelError` if a file cannot be used; then nothing may change."""
        config = resolve_config(self._arguments, self._environment)
        if config.file.path is None and self._running.file.path is None:
            raise ModelError(
                "there is no config file to read again. Start the server with --config FILE to change its models while "
                "it runs"
            )
        if not config.settings.models and self._running.settings.models:
            # As likely a file that is being written as a wish; a restart would serve the demo model.
            raise ModelError(f"{config.file.path or self._running.file.path} names no model any more")
        return ConfigUpdate(config.settings.models, tuple(changed_options(self._running, config)))


def changed_options(before: ServeConfig, after: ServeConfig) -> list[str]:
    """The options of the server whose values differ, by their names in the file."""
    changed = [name for name in OPTIONS if before.values[name] != after.values[name]]
    if before.settings.api_keys != after.settings.api_keys and "api_keys" not in changed:
        changed.append("api_keys")  # the same file of keys, with other keys
    if before.settings.tool_servers != after.settings.tool_servers:
        changed.append("mcp.servers")
    return changed
