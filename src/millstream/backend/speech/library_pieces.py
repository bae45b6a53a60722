"""What the speakers on mlx-audio's modules have in common: one piece at a time, a voice by its name, no speed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from millstream.engine.speech.plan import PieceInput
from millstream.errors import BadRequest
from millstream.speech_types import Voice


def only_piece(pieces: Sequence[PieceInput], voices: Sequence[Voice]) -> tuple[PieceInput, str]:
    """The piece, and the name of its voice: the model's default if it names none, empty if the model has none. Raises
    `BadRequest` for what these models cannot do."""
    (piece,) = pieces
    if piece.speed != 1.0:
        raise BadRequest("this model speaks at its own speed: speed must be 1")
    if len(piece.voice) > 1:
        raise BadRequest("this model cannot mix voices: name one")
    names = [voice.name for voice in voices]
    if not piece.voice:
        return piece, names[0] if names else ""
    name = piece.voice[0][0]
    if name not in names:
        known = f"It has: {', '.join(names)}." if names else "It has no named voices."
        raise BadRequest(f"there is no voice {name!r}. {known}")
    return piece, name


def seed_of(piece: PieceInput) -> int:
    """These models draw at random. The same text sounds the same each time, whatever was spoken before it."""
    spoken = f"{piece.piece.text}\0{piece.voice}\0{piece.instructions}"
    return zlib.crc32(spoken.encode())
