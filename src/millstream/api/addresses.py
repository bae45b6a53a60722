"""Names and addresses of this machine."""

from __future__ import annotations

import ipaddress

_LOCAL = "localhost"


def is_loopback_address(text: str) -> bool:
    """127.0.0.0/8 and ::1, also as IPv6 writes an IPv4 address (::ffff:127.0.0.1)."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_loopback_name(name: str) -> bool:
    """A name or address, lower case and without brackets, that leads to the machine which asks."""
    return name == _LOCAL or name.endswith(f".{_LOCAL}") or is_loopback_address(name)
