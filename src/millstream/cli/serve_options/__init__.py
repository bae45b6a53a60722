"""The options of `millstream serve`: one table, from which flags, variables, the file's keys and the docs are made.

A new option is one `Option` in the module of its topic and a field of `Settings`.
"""

from __future__ import annotations

from millstream.cli.serve_options import engine, logs, media, models, network, store
from millstream.cli.serve_options.option import Option, OptionGroup

GROUPS = (
    OptionGroup("address", network.ADDRESS, essential=True),
    OptionGroup("API keys", network.KEYS, essential=True),
    OptionGroup("memory", models.BUDGET, essential=True),
    OptionGroup("loading", models.LOADING),
    OptionGroup("tool calls and reasoning", models.FORMATS_OF_OUTPUT),
    OptionGroup("caches", models.CACHES),
    OptionGroup("speculative decoding", models.SPECULATIVE),
    OptionGroup("batching", engine.BATCHING),
    OptionGroup("engine", engine.ENGINE),
    OptionGroup("web pages and proxies", network.ACCESS),
    OptionGroup("images, audio and video", media.MEDIA),
    OptionGroup("stored responses", store.STORE),
    OptionGroup("connection limits", network.LIMITS),
    OptionGroup("logs", logs.LOGS),
    OptionGroup("fast paths", engine.FAST),
)
"""In the order in which the help and the docs show them: what most people need comes first."""

OPTIONS: dict[str, Option] = {option.name: option for group in GROUPS for option in group.options}
