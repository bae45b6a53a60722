"""`millstream serve`: run the server until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import sys

from millstream.cli.config_reload import Reread
from millstream.cli.live_line import live_line
from millstream.cli.serve_options.parser import fill_parser
from millstream.cli.settings import ServeConfig, resolve_config
from millstream.cli.show_config import as_json, as_table
from millstream.errors import MillstreamError, ModelError
from millstream.installed import require_mlx
from millstream.logs import configure_logs

log = logging.getLogger(__name__)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="serve models over HTTP", add_help=False)
    parser.set_defaults(run=run)
    fill_parser(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.json and not arguments.show_config:
            raise ModelError("--json belongs to --show-config: add --show-config, or leave --json out")
        config = resolve_config(arguments)
        if arguments.show_config:
            print(as_json(config) if arguments.json else as_table(config))
            return 0
        require_mlx()
        _start_log(config)
        from millstream.last_resort import leave
        from millstream.server import serve  # two seconds, which other commands and wrong options do without

        line = live_line()
        code, clean = serve(config.settings, line.show if line else None, reread=Reread(arguments, config))
    except MillstreamError as error:
        print(f"millstream: {error.message}", file=sys.stderr)
        return 1
    if not clean:
        leave(code)
    return code


def _start_log(config: ServeConfig) -> None:
    configure_logs(config.log_level.upper(), config.log_format)
    for name in ("httpx", "httpx2", "mcp"):  # they log each request, with its URL
        logging.getLogger(name).setLevel(logging.WARNING)
    if config.file.path is not None:
        log.info("config file: %s", config.file.path)
    for warning in config.warnings:
        log.warning("%s", warning)
