"""The options of `millstream serve`, one module per concern. The help lists what most people need first."""

from __future__ import annotations

import argparse

from millstream.cli.serve_options import engine, logs, media, models, network, store


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option group, in the order in which `--help` shows them."""
    network.add_server(parser.add_argument_group("server"))
    logs.add_logs(parser.add_argument_group("logs and traces"))
    models.add_models(parser.add_argument_group("models"))
    models.add_memory(parser.add_argument_group("memory"))
    engine.add_batching(parser.add_argument_group("batching"))
    engine.add_engine(parser.add_argument_group("engine"))
    media.add_media(parser.add_argument_group("images, audio and video"))
    store.add_store(parser.add_argument_group("stored responses"))
    network.add_limits(parser.add_argument_group("connection limits"))
    engine.add_fast_paths(parser.add_argument_group("fast paths"))
