"""Media options, from the command line and from the config file."""

from __future__ import annotations

import argparse
from pathlib import Path

from millstream.cli import serve
from millstream.cli.settings import settings_of
from millstream.compose import media_limits
from millstream.config import Settings
from millstream.media.limits import MediaLimits


def parse(*argv: str) -> Settings:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return settings_of(parser.parse_args(["serve", *argv]), {})


def test_the_defaults_are_those_of_media_limits() -> None:
    assert media_limits(parse()) == MediaLimits()


def test_every_option_arrives() -> None:
    given = parse(
        *("--media-folder", "/a", "--media-folder", "b", "--media-bytes", "5MB", "--media-pixels", "6"),
        *("--media-count", "0", "--media-timeout", "8s", "--media-seconds", "9", "--allow-private-media"),
    )
    assert media_limits(given) == MediaLimits(5 * 10**6, 6, 0, 8.0, (Path("/a"), Path("b")), True, 9.0)


def test_the_file_has_them_too(tmp_path: Path) -> None:
    file = tmp_path / "mill.toml"
    file.write_text(
        '[server]\nmedia_folders = ["pictures", "/all"]\nmedia_bytes = "5MB"\nmedia_pixels = 6\nmedia_count = 7\n'
        'media_timeout = "8s"\nmedia_seconds = 9\nallow_private_media = true\n'
    )
    limits = MediaLimits(5 * 10**6, 6, 7, 8.0, (tmp_path / "pictures", Path("/all")), True, 9.0)
    assert media_limits(parse("--config", str(file))) == limits
    assert media_limits(parse("--config", str(file), "--media-count", "9")).count == 9


def test_memory_for_media_and_for_output(tmp_path: Path) -> None:
    file = tmp_path / "mill.toml"
    file.write_text('[server]\nmedia_memory = "5MB"\nunread_output = "6MB"\nwrite_timeout = "7s"\n')
    options = ("--media-memory", "5MB", "--unread-output", "6MB", "--write-timeout", "7s")
    for given in (parse(*options), parse("--config", str(file))):
        assert (given.media_memory, given.unread_output, given.write_timeout) == (5 * 10**6, 6 * 10**6, 7.0)
