"""Public and private addresses, in every notation."""

from __future__ import annotations

import socket

import pytest

from millstream.errors import MediaRefused
from millstream.media.addresses import checked_addresses, is_public


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.9.1",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.3.4",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd12:3456::1",
        "ff02::1",
        "fec0::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::a9fe:a9fe",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "2001:0:7f00:1::",
        "nonsense",
    ],
)
def test_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "2130706433", "127.1", "0x7f.0.0.1"])
def test_every_name_of_this_machine_is_refused(host: str) -> None:
    try:
        socket.getaddrinfo(host, 80)
    except OSError:
        pytest.skip(f"needs a system that resolves {host}")
    with pytest.raises(MediaRefused, match=r"not a public address.*--allow-private-media"):
        checked_addresses(host, 80, allow_private=False)


def test_private_addresses_are_allowed_by_option() -> None:
    assert checked_addresses("127.0.0.1", 80, allow_private=True) == ["127.0.0.1"]


def test_an_unknown_host() -> None:
    with pytest.raises(MediaRefused, match="cannot be resolved"):
        checked_addresses("no-such-host.invalid", 80, allow_private=False)
