"""Resolves a host and checks that its addresses are public, so that a media URL cannot reach the operator's network.

The connection goes to the address that was checked, not to the host name: a DNS answer that changes a moment later
(DNS rebinding) has no effect.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

from millstream.errors import MediaRefused

Lookup = Callable[[str, int, float], list[str]]
"""Returns the addresses of a host and port, within a number of seconds. Raises `OSError`, or `TimeoutError` if the time
is over."""

_IPv6 = ipaddress.IPv6Address
# IPv4 addresses embedded in IPv6 ones by translation (RFC 6052, RFC 8215): `ipaddress` does not recognise these forms.
_TRANSLATED = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))


def system_lookup(host: str, port: int, seconds: float) -> list[str]:
    """Ask the system's resolver. It cannot be interrupted, so `seconds` is ignored; `media/resolver.py` enforces it."""
    results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in results))


def checked_addresses(
    host: str, port: int, *, allow_private: bool, lookup: Lookup = system_lookup, seconds: float = 0.0
) -> list[str]:
    """The addresses to connect to for `host`. Raises `MediaRefused` if any of them is not public."""
    try:
        addresses = lookup(host, port, seconds)
    except TimeoutError:
        raise
    except (OSError, UnicodeError) as error:
        raise MediaRefused(f"the host {host!r} of a media URL cannot be resolved: {error}") from error
    for address in addresses:
        if not allow_private and not is_public(address):
            raise MediaRefused(
                f"the host {host!r} of a media URL resolves to {address}, which is not a public address. Send the file "
                "as a data URI, or have the operator start the server with --allow-private-media"
            )
    return addresses


def is_public(text: str) -> bool:
    """True if an address, in any notation, is on the public internet."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, _IPv6):
        embedded = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if embedded is not None:
            return address.ipv4_mapped is not None and is_public(str(embedded))
        if address.is_site_local or any(address in network for network in _TRANSLATED):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
