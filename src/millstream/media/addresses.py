"""Which addresses may be fetched from. A name is looked up here and the connection goes to what was checked, so that a
name which says something else a moment later leads nowhere."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

from millstream.errors import MediaRefused

LookUp = Callable[[str, int, float], list[str]]
"""The addresses of a host at a port, within seconds. Raises `OSError`; a `TimeoutError` when the time is over."""

_IPv6 = ipaddress.IPv6Address
# Ways to write an IPv4 address as an IPv6 one, beside those that `ipaddress` knows: translated (RFC 6052, RFC 8215).
_TRANSLATED = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))


def system_look_up(host: str, port: int, seconds: float) -> list[str]:
    """The system's own resolver cannot be interrupted: it takes the time that it takes, whatever `seconds` says.
    `media/resolver.py` is what holds to it."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


def addresses_of(
    host: str, port: int, *, private: bool, look_up: LookUp = system_look_up, seconds: float = 0.0
) -> list[str]:
    """Where to connect to for `host`. Refused as a whole if any of its addresses is not public."""
    try:
        addresses = look_up(host, port, seconds)
    except TimeoutError:
        raise
    except (OSError, UnicodeError) as error:
        raise MediaRefused(f"the host {host!r} of a media URL is not known: {error}") from error
    for address in addresses:
        if not private and not is_public(address):
            raise MediaRefused(
                f"the host {host!r} of a media URL leads to {address}, which is no public address. Send the file as a "
                "data URI; or the operator may start the server with --allow-private-media"
            )
    return addresses


def is_public(text: str) -> bool:
    """Whether an address is on the open internet, in whatever form it is written."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, _IPv6):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is not None:
            return address.ipv4_mapped is not None and is_public(str(inner))
        if address.is_site_local or any(address in network for network in _TRANSLATED):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
