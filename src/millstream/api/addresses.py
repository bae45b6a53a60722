"""Recognises loopback addresses and host names."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

_LOCAL = "localhost"


@lru_cache(256)  # a client sends the same name each time
def is_loopback_address(text: str) -> bool:
    """True for 127.0.0.0/8 and ::1, also in IPv4-mapped form (::ffff:127.0.0.1)."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_loopback_name(name: str) -> bool:
    """True if a host name or address resolves to the client's own machine. Expects lower case and no brackets."""
    return name == _LOCAL or name.endswith(f".{_LOCAL}") or is_loopback_address(name)
