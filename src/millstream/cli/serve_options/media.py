"""Options of images, audio and video in requests."""

from __future__ import annotations

from millstream.cli import toml_tables as toml
from millstream.cli.serve_options.option import Option
from millstream.cli.serve_options.values import PATH, SIZE, SWITCH, TIME, integer, listed

MEDIA = (
    Option(
        "media_folders",
        listed(PATH, toml.strings, "a list of folders"),
        "let requests name files in this folder; repeatable",
        default_text="none",
        flag="--media-folder",
    ),
    Option("media_bytes", SIZE, "largest file"),
    Option("media_pixels", integer(1), "most pixels of an image"),
    Option("media_count", integer(0), "most files per request"),
    Option("media_timeout", TIME, "time to download a file, and to decode a video"),
    Option("media_seconds", TIME, "longest audio file; a model may accept less"),
    Option("media_memory", SIZE, "memory for the media of all requests; over it, requests wait or get a 503"),
    Option("audio_bytes", SIZE, "largest audio file to transcribe; uploads are not held to --body-limit"),
    Option("audio_seconds", TIME, "longest audio to transcribe"),
    Option(
        "allow_private_media",
        SWITCH,
        "download from private addresses too; anyone who can send requests can then reach your network",
        default_text="no",
    ),
)
