"""A chat's gaps beside a transcription: see `chat_gaps.py`.

python bench/transcription_gaps.py --model whisper-tiny.en --audio jfk.wav --chat demo --times 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

import httpx

import chat_gaps
from models import find


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a transcription model")
    parser.add_argument("--audio", type=Path, required=True)
    parser.add_argument("--chat", default="demo", help="the chat model: a folder, or a name of bench/models.py")
    parser.add_argument("--times", type=int, default=8, help="how often the file is transcribed, one after the other")
    arguments = parser.parse_args()
    data = arguments.audio.read_bytes()

    async def transcribe(client: httpx.AsyncClient, times: int) -> None:
        for _ in range(times):
            form = {"model": arguments.model.name}
            reply = await client.post(
                "/v1/audio/transcriptions", data=form, files={"file": (arguments.audio.name, data)}
            )
            reply.raise_for_status()

    gaps = chat_gaps.measure(
        find(arguments.chat),
        arguments.model,
        lambda client: transcribe(client, 1),
        lambda client: transcribe(client, arguments.times),
    )
    chat_gaps.report(gaps, f"{arguments.times} transcriptions of {arguments.audio.name} ({gaps.seconds:.0f} s)")


if __name__ == "__main__":
    main()
