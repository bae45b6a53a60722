"""Options of the HTTP server: its address, who may call it, and the limits on connections."""

from __future__ import annotations

from dataclasses import replace

from millstream.cli import arguments
from millstream.cli import toml_tables as toml
from millstream.cli.serve_options.option import Option
from millstream.cli.serve_options.values import PATH, SIZE, TEXT, TIME, Value, integer, listed

_ORIGIN = Value(arguments.origin, toml.string, "an origin", metavar="ORIGIN")
_HOST = Value(arguments.host_name, toml.string, "a host name", metavar="NAME")
_KEY = replace(TEXT, metavar="KEY")

ADDRESS = (
    Option("host", replace(TEXT, metavar="ADDRESS", accepts="an address or a host name"), "address to listen on"),
    Option("port", integer(0, 65535, metavar="PORT"), "port to listen on; 0: any free port"),
)

KEYS = (
    Option(
        "api_keys",
        listed(_KEY, toml.strings, "a list of keys"),
        "require this API key; repeatable, any of the keys is accepted. Other users of this machine can see it in the "
        "process list: prefer --api-key-file or the variable MILLSTREAM_API_KEY",
        default_text="none, the API is open",
        flag="--api-key",
        setting=None,
        own_default=(),
        secret=True,
    ),
    Option(
        "api_key_file",
        replace(PATH, metavar="FILE", accepts="a file"),
        "file with API keys, one per line; lines that start with # are ignored",
        default_text="none",
        setting=None,
    ),
    Option(
        "api_key",
        _KEY,
        "one API key, as a variable that commands such as millstream launch read too; it may contain a comma",
        default_text="none",
        setting=None,
        secret=True,
        places=frozenset({"environment"}),
    ),
)
"""Whichever place sets one of these decides about all of them: an old key must not stay valid by accident."""

ACCESS = (
    Option(
        "cors_origins",
        listed(_ORIGIN, toml.origins, "a list of origins"),
        "let web pages of this origin call the API, e.g. http://localhost:3000; loopback: all pages that this machine "
        "serves; *: any origin; repeatable",
        default_text="without an API key only installed apps and the server's own pages, with a key any page",
        flag="--cors-origin",
    ),
    Option(
        "allowed_hosts",
        listed(_HOST, toml.host_names, "a list of host names"),
        "accept requests with this Host header, e.g. behind a proxy; *: any; repeatable",
        default_text="on a loopback address only loopback names, otherwise any",
        flag="--allowed-host",
    ),
)

LIMITS = (
    Option("grace", TIME, "time for running requests to finish after SIGTERM"),
    Option("body_limit", SIZE, "largest request body"),
    Option(
        "max_connections",
        integer(1),
        "concurrent connections; over the limit, idle ones are closed, then new ones get a 503",
    ),
    Option("header_timeout", TIME, "time to receive the headers of a request; 0: no limit"),
    Option("body_timeout", TIME, "time without a byte of the request body; 0: no limit"),
    Option("write_timeout", TIME, "disconnect a client that reads nothing for this long; 0: never"),
    Option(
        "unread_output",
        SIZE,
        "output that may wait for a client that does not read; over it, the request is cancelled",
    ),
)
