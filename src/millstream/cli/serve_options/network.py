"""Options of the HTTP server: its address, who may call it, and the limits on connections."""

from __future__ import annotations

from pathlib import Path

from millstream.cli.arguments import duration, host_name, memory_size, origin, port, positive, seconds
from millstream.cli.serve_options.common import DEFAULTS, Group, with_default
from millstream.cli.settings import KEY_VARIABLE


def add_server(group: Group) -> None:
    group.add_argument("--host", help=with_default("address to listen on", DEFAULTS.host))
    group.add_argument("--port", type=port, help=with_default("port to listen on; 0: any free port", DEFAULTS.port))
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="require this API key; repeatable, any of the keys is accepted. Other users of this machine can see it in "
        f"the process list: prefer --api-key-file or the variable {KEY_VARIABLE} (default: none, the API is open)",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="file with API keys, one per line; lines that start with # are ignored",
    )
    group.add_argument(
        "--cors-origin",
        type=origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin call the API, e.g. http://localhost:3000; loopback: all pages that this "
        "machine serves; *: any origin; repeatable (default: without an API key only installed apps and the server's "
        "own pages, with a key any page)",
    )
    group.add_argument(
        "--allowed-host",
        type=host_name,
        action="append",
        default=[],
        metavar="NAME",
        help="accept requests with this Host header, e.g. behind a proxy; *: any; repeatable "
        "(default: on a loopback address only loopback names, otherwise any)",
    )
    group.add_argument(
        "--grace",
        type=seconds,
        metavar="SECONDS",
        help=with_default("time for running requests to finish after SIGTERM", f"{DEFAULTS.grace:g}"),
    )


def add_limits(group: Group) -> None:
    group.add_argument(
        "--body-limit", type=positive, metavar="BYTES", help=with_default("largest request body", DEFAULTS.body_limit)
    )
    group.add_argument(
        "--max-connections",
        type=positive,
        metavar="COUNT",
        help=with_default(
            "concurrent connections; over the limit, idle ones are closed, then new ones get a 503",
            DEFAULTS.max_connections,
        ),
    )
    group.add_argument(
        "--header-timeout",
        type=duration,
        metavar="TIME",
        help=with_default("time to receive the headers of a request; 0: no limit", f"{DEFAULTS.header_timeout:g}s"),
    )
    group.add_argument(
        "--body-timeout",
        type=duration,
        metavar="TIME",
        help=with_default("time without a byte of the request body; 0: no limit", f"{DEFAULTS.body_timeout:g}s"),
    )
    group.add_argument(
        "--write-timeout",
        type=duration,
        metavar="TIME",
        help=with_default(
            "disconnect a client that reads nothing for this long; 0: never", f"{DEFAULTS.write_timeout:g}s"
        ),
    )
    group.add_argument(
        "--unread-output",
        type=memory_size,
        metavar="SIZE",
        help=with_default(
            "output that may wait for a client that does not read; over it, the request is cancelled", "8MiB"
        ),
    )
