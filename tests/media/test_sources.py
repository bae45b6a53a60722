"""Media sources: data URIs, URLs, and files below allowed folders."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from media.web import Web
from millstream.errors import MediaRefused
from millstream.media.limits import MediaLimits
from millstream.media.sources import is_local, read_source

DATA = bytes(range(256))
TEXT = base64.b64encode(DATA).decode()
LIMITS = MediaLimits(file_bytes=1000, allow_private=True)


@pytest.mark.parametrize(
    "source",
    [
        f"data:image/png;base64,{TEXT}",
        f"data:image/png; base64,{TEXT}",
        f"data:image/png ;charset=utf-8; BASE64 , {TEXT}",
        f"DATA:image/png;charset=x;BASE64,{TEXT}",
        f"data:;base64,{TEXT.rstrip('=')}",
        "data:image/png;base64," + base64.urlsafe_b64encode(DATA).decode(),
        "data:image/png;base64," + "\n".join(TEXT[at : at + 64] for at in range(0, len(TEXT), 64)),
        "data:image/png;base64," + TEXT.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
        "data:," + "".join(f"%{byte:02x}" for byte in DATA),
    ],
)
def test_data_uris(source: str) -> None:
    assert is_local(source)
    assert read_source(source, LIMITS) == DATA


@pytest.mark.parametrize(
    "source, words",
    [
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,$$$$", "not valid base64"),
        ("data:image/png;base64,AAAAA", "not valid base64"),
        ("data:image/png;base64," + "A" * 4000, "this server takes at most 1000"),
        ("data:," + "A" * 4000, "this server takes at most 1000"),
        ("data:," + "A" * 1001, "this server takes at most 1000"),
        ("ftp://host/x.png", "is not a media source"),
        ("x.png", "is not a media source"),
        ("javascript:alert(1)", "is not a media source"),
        ("", "is not a media source"),
        ("/etc/passwd", "reads no local files"),
        ("file:///etc/passwd", "reads no local files"),
    ],
)
def test_refused(source: str, words: str) -> None:
    with pytest.raises(MediaRefused, match=words):
        read_source(source, LIMITS)


def test_over_http(web: Web) -> None:
    url = web.body("/a", DATA)
    assert not is_local(url)
    assert read_source(url, LIMITS) == DATA


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    allowed = tmp_path / "allowed"
    (allowed / "deep").mkdir(parents=True)
    (allowed / "deep" / "a b.png").write_bytes(DATA)
    (allowed / "large").write_bytes(b"x" * 1001)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "x").write_bytes(b"secret")
    (allowed / "link").symlink_to(tmp_path / "secret")
    return allowed


def test_files_below_an_allowed_folder(folder: Path) -> None:
    limits = MediaLimits(folders=(folder,))
    path = folder / "deep" / "a b.png"
    for source in (str(path), f"file://{folder}/deep/a%20b.png", f"file://localhost{folder}/deep/../deep/a%20b.png"):
        assert read_source(source, limits) == DATA


@pytest.mark.parametrize("name", ["../secret", "link", "none", "deep", "../allowed-not/x", "..", "a\0b"])
def test_no_other_files(folder: Path, name: str) -> None:
    with pytest.raises(MediaRefused, match="is not a file below an allowed folder"):
        read_source(f"{folder}/{name}", MediaLimits(folders=(folder,)))


def test_a_file_over_the_limit(folder: Path) -> None:
    with pytest.raises(MediaRefused, match="this server takes at most 1000"):
        read_source(f"{folder}/large", MediaLimits(file_bytes=1000, folders=(folder,)))


def test_another_host(folder: Path) -> None:
    with pytest.raises(MediaRefused, match="names another host"):
        read_source("file://server/share/x", MediaLimits(folders=(folder,)))
