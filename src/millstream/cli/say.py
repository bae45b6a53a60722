"""`millstream say`: a text as speech, into a file or the loudspeaker."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from millstream.cli.parser import examples
from millstream.cli.players import play
from millstream.cli.server_client import DEFAULT_URL, ServerClient, add_server_options
from millstream.errors import BadRequest, MillstreamError

FORMATS = {".wav": "wav", ".mp3": "mp3", ".ogg": "opus", ".opus": "opus", ".flac": "flac", ".aac": "aac", ".pcm": "pcm"}
"""What the end of a file's name says about its format."""
STANDARD_OUTPUT = "-"
PATH = "/v1/audio/speech"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "say",
        help="speak a text with a running server's voice",
        description="Speak a text with a speech model of a running server. Without a file, it is played as it is made.",
        epilog=examples(
            ("millstream say 'Good morning.'", "play it"),
            ("millstream say -o speech.mp3 < story.txt", "read a text into a file"),
            ("millstream say 'Hello.' --voice af_bella --speed 1.2", "another voice, a bit faster"),
            ("millstream say --voices", "list the voices"),
        ),
    )
    parser.set_defaults(run=run)
    parser.add_argument("words", nargs="*", metavar="TEXT", help="what to say; default: standard input")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=f"write to a file ({', '.join(FORMATS)}); - for standard output, as WAV"
    )
    parser.add_argument("-m", "--model", default="", help="which model speaks; default: the first that does")
    parser.add_argument("--voice", metavar="NAME", help="default: the model's own")
    parser.add_argument("--speed", type=float, metavar="FACTOR", help="0.25 to 4; 2 is twice as fast")
    parser.add_argument("--language", metavar="CODE", help="of the text; default: that of the voice")
    parser.add_argument("--instructions", metavar="TEXT", help="how to speak, for models that take it")
    parser.add_argument("--voices", action="store_true", help="list the voices instead")
    add_server_options(parser.add_argument_group("server"))


def run(arguments: argparse.Namespace) -> int:
    client = ServerClient(arguments.url or DEFAULT_URL, arguments.api_key)
    if arguments.voices:
        return _print_voices(client, arguments.model)
    form = _format(arguments.output)
    body = _body(arguments)
    if arguments.output is None:
        return play(client.download(PATH, body | {"response_format": form}))
    if arguments.output == STANDARD_OUTPUT:
        for piece in client.download(PATH, body | {"response_format": form}):
            sys.stdout.buffer.write(piece)
        return 0
    # A whole file has its length in the header.
    _write(Path(arguments.output), client.download(PATH, body | {"response_format": form, "stream": False}))
    return 0


def _print_voices(client: ServerClient, model: str) -> int:
    listed = client.get(f"/v1/audio/voices?model={quote(model, safe='')}", timeout=600)  # it may have to be loaded
    for voice in listed["voices"]:
        details = [voice[name] for name in ("language", "gender") if voice.get(name)]
        print("\t".join([voice["id"], *details]))
    return 0


def _format(output: str | None) -> str:
    if output is None:
        return "pcm"
    if output == STANDARD_OUTPUT:
        if sys.stdout.isatty():
            raise BadRequest("Standard output is a terminal: give a file with -o, or leave -o out to play it.")
        return "wav"
    suffix = Path(output).suffix.lower()
    if suffix not in FORMATS:
        raise BadRequest(f"What format shall {output!r} have? Its name must end with one of {', '.join(FORMATS)}.")
    return FORMATS[suffix]


def _body(arguments: argparse.Namespace) -> dict[str, object]:
    text = " ".join(arguments.words) or ("" if sys.stdin.isatty() else sys.stdin.read())
    if not text.strip():
        raise BadRequest("There is nothing to say: give a text, or pipe one into the command.")
    given = {name: getattr(arguments, name) for name in ("voice", "speed", "language", "instructions")}
    return {"model": arguments.model, "input": text} | {
        name: value for name, value in given.items() if value is not None
    }


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    """All of it or nothing: half a file would play as if it were all."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            for piece in pieces:
                file.write(piece)
        os.replace(part, path)
    except OSError as error:
        raise MillstreamError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        part.unlink(missing_ok=True)
