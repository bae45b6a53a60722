"""How long after a phrase its words come: feeds a WAV file (16-bit mono) to /v1/realtime as if it were spoken.

    python bench/realtime_delay.py ws://127.0.0.1:8000/v1/realtime?intent=transcription speech.wav --speed 1

The delay is from the moment at which the last sound of the phrase was sent (without the silence after it) to the event
that completes its transcript. It includes the silence that the server waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import time
import wave
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

CHUNK_SECONDS = 0.1
TRAILING_SECONDS = 2.0
TRANSCRIPT = "conversation.item.input_audio_transcription"


async def main() -> None:
    options = arguments()
    with wave.open(options.file) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2), "the file must be 16-bit mono"
        rate, audio = file.getframerate(), file.readframes(file.getnframes())
    audio += bytes(2 * int(TRAILING_SECONDS * rate))
    async with connect(options.url, max_size=None, compression=None) as socket:
        turns = {"type": "server_vad", "silence_duration_ms": options.silence}
        sound = {"format": {"type": "audio/pcm", "rate": rate}, "turn_detection": turns}
        session = {"type": "transcription", "audio": {"input": sound}}
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        start = time.monotonic()
        feeding = asyncio.create_task(feed(socket, audio, rate, options.speed))
        await listen(socket, start, options.speed, feeding)


async def feed(socket: ClientConnection, audio: bytes, rate: int, speed: float) -> None:
    step = 2 * int(CHUNK_SECONDS * rate)
    start = time.monotonic()
    for number, at in enumerate(range(0, len(audio), step)):
        piece = base64.b64encode(audio[at : at + step]).decode()
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": piece}))
        await asyncio.sleep(max(0.0, start + (number + 1) * CHUNK_SECONDS / speed - time.monotonic()))


async def listen(socket: ClientConnection, start: float, speed: float, feeding: asyncio.Task[None]) -> None:
    ended: dict[str, float] = {}
    first: dict[str, float] = {}
    open_items: set[str] = set()
    texts, delays = [], []
    while not feeding.done() or open_items:
        try:
            event: dict[str, Any] = json.loads(await asyncio.wait_for(socket.recv(), 1))
        except TimeoutError:
            continue
        now, item = time.monotonic() - start, event.get("item_id", "")
        match event["type"]:
            case "error":
                print(event["error"])
            case "input_audio_buffer.speech_started":
                open_items.add(item)
            case "input_audio_buffer.speech_stopped":
                ended[item] = event["audio_end_ms"] / 1000 / speed
                print(f"{now:7.2f} s  phrase ends at {ended[item]:.2f} s")
            case kind if kind == f"{TRANSCRIPT}.delta":
                first.setdefault(item, now)
            case kind if kind == f"{TRANSCRIPT}.completed":
                open_items.discard(item)
                texts.append(event["transcript"])
                delays.append(now - ended[item])
                print(
                    f"{now:7.2f} s  {event['transcript']!r}: first words {first.get(item, now) - ended[item]:.2f} s, "
                    f"all {delays[-1]:.2f} s after the end of the phrase"
                )
    print(" ".join(texts))
    print(f"{len(delays)} phrases; delay: median {sorted(delays)[len(delays) // 2]:.2f} s, most {max(delays):.2f} s")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("file")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster than real time it is fed")
    parser.add_argument("--silence", type=int, default=500, help="milliseconds of silence that end a phrase")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
