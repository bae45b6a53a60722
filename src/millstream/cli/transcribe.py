"""`millstream transcribe`: the words of an audio file, as text or subtitles."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from millstream.cli.parser import examples
from millstream.cli.server_client import DEFAULT_URL, ServerClient, add_server_options
from millstream.errors import BadRequest, MillstreamError

FORMATS = ("text", "srt", "vtt", "json", "verbose_json")
SUFFIXES = {".txt": "text", ".srt": "srt", ".vtt": "vtt", ".json": "verbose_json"}
"""What the end of the output's name says about its format."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "transcribe",
        help="write down what is said in an audio file",
        description="Transcribe an audio file with a transcription model of a running server.",
        epilog=examples(
            ("millstream transcribe talk.mp3", "print the text"),
            ("millstream transcribe talk.mp3 -o talk.srt", "subtitles"),
            ("millstream transcribe rede.wav --translate", "in English"),
        ),
    )
    parser.set_defaults(run=run)
    parser.add_argument("file", type=Path, metavar="FILE", help="WAV; MP3, FLAC, MP4 and others if the server has PyAV")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to a file instead of printing")
    parser.add_argument("-f", "--format", choices=FORMATS, help="default: by the output's name, or else text")
    parser.add_argument("-m", "--model", default="", help="which model transcribes; default: the first that does")
    parser.add_argument("--language", metavar="CODE", help="such as en; default: the model finds out")
    parser.add_argument("--prompt", metavar="TEXT", help="words to expect: names, terms, spelling")
    parser.add_argument("--translate", action="store_true", help="into English")
    add_server_options(parser.add_argument_group("server"))


def run(arguments: argparse.Namespace) -> int:
    client = ServerClient(arguments.url or DEFAULT_URL, arguments.api_key)
    if arguments.output is not None and arguments.output.suffix.lower() not in SUFFIXES and arguments.format is None:
        raise BadRequest(f"What format shall {arguments.output} have? Say it with --format.")
    form = arguments.format or (SUFFIXES[arguments.output.suffix.lower()] if arguments.output else "text")
    given = {"model": arguments.model, "language": arguments.language, "prompt": arguments.prompt}
    fields = {"response_format": form} | {name: value for name, value in given.items() if value}
    route = "translations" if arguments.translate else "transcriptions"
    answer = client.upload(f"/v1/audio/{route}", fields, arguments.file.name, _read(arguments.file))
    if arguments.output is None:
        sys.stdout.write(answer.decode().rstrip("\n") + "\n")
        return 0
    try:
        arguments.output.write_bytes(answer)
    except OSError as error:
        raise MillstreamError(f"{arguments.output} cannot be written: {error.strerror}.") from error
    return 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}.") from error
