"""Speed of transcription. Runs the backend and the scheduler in this thread, without a server.

    python bench/transcription.py --model whisper-tiny.en --audio jfk.wav        ours against mlx-audio, one run
    python bench/transcription.py --random large-v3                              random weights, any device

The first form needs mlx-audio and transformers. It compares one file and several at once, with mlx-audio as it comes
(float16, one file after the other) and in float32, which is what it is fastest in on a CPU. CPU seconds stand beside
the wall's: on a machine that does other work, they are what can be compared.

In the second form every window is written down with the same number of tokens, about what half a minute of speech has.
"""

from __future__ import annotations

import argparse
import time
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millstream.backend.environment import load_blas
from millstream.engine.protocols import ignore_progress
from millstream.engine.transcription.messages import Options, Transcribe, Window, WindowText
from millstream.engine.transcription.plan import TranscriptionPlan, TranscriptionResult
from millstream.engine.transcription.scheduler import TranscriptionScheduler
from millstream.model_facts import TranscriptionFacts
from millstream.models.transcription_layout import WhisperShape

RATE = 16_000
SHAPES = {
    # mels, width, heads, encoder layers, decoder layers, vocabulary
    "tiny": (80, 384, 6, 4, 4, 51_865),
    "base": (80, 512, 8, 6, 6, 51_865),
    "small": (80, 768, 12, 12, 12, 51_865),
    "medium": (80, 1024, 16, 24, 24, 51_865),
    "large-v3": (128, 1280, 20, 32, 32, 51_866),
    "large-v3-turbo": (128, 1280, 20, 32, 4, 51_866),
}


@dataclass(frozen=True)
class Took:
    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:7.2f} s ({self.cpu:6.2f} s of CPU)"


def timed(work: Callable[[], Any]) -> tuple[Any, Took]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, Took(time.perf_counter() - wall, time.process_time() - cpu)


Step = Callable[[TranscriptionPlan], TranscriptionResult]


def run(step: Step, facts: TranscriptionFacts, requests: Sequence[Transcribe]) -> list[WindowText]:
    scheduler = TranscriptionScheduler(facts)
    for request in requests:
        scheduler.submit(request)
    texts: list[WindowText] = []
    while not scheduler.idle:
        plan = scheduler.plan()
        events = scheduler.advance(plan, step(plan))
        texts += [event for event in events if isinstance(event, WindowText)]
    return texts


def request(number: int, samples: np.ndarray, options: Options) -> Transcribe:
    return Transcribe(number, options, (Window(0, samples.astype(np.float32).tobytes()),))


def read_wav(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2), "16 kHz, mono, 16 bits"
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def compare(folder: Path, audio: Path, files: int) -> None:
    from millstream.backend.transcription.backend import MlxTranscriptionBackend, TranscriptionSettings
    from millstream.models.source import ModelSource
    from millstream.text.speech_vocabulary import speech_vocabulary

    samples = read_wav(audio)
    source = ModelSource(folder.name, "folder", folder)
    backend = MlxTranscriptionBackend(TranscriptionSettings(folder, speech_vocabulary(source)))
    facts = backend.load()
    options = Options()
    ours: dict[int, Took] = {}
    for count in (1, files):
        requests = [request(number, samples, options) for number in range(count)]
        texts, ours[count] = timed(lambda requests=requests: run(backend.step, facts, requests))
        print(f"Millstream, {count} files: {ours[count]}")
    print("".join(segment.text for segment in texts[0].segments))
    for name in ("float32", "as it comes, float16"):
        theirs = mlx_audio(folder, samples, float32=name == "float32")
        print(f"mlx-audio, {name}, 1 file: {theirs}")
        for count, own in ours.items():  # one after the other: several take so many times as long
            wall, cpu = count * theirs.wall / own.wall, count * theirs.cpu / own.cpu
            print(f"    {count} files: {wall:.1f} times faster by the clock, {cpu:.1f} times less CPU")


def mlx_audio(folder: Path, samples: np.ndarray, *, float32: bool) -> Took:
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_audio.stt.utils import load_model

    model = load_model(str(folder))
    options = {}
    if float32:
        model.update(tree_map(lambda x: x.astype(mx.float32), model.parameters()))
        model.dtype = mx.float32
        for part, name in ((model.encoder, "_positional_embedding"), (model.decoder, "_mask")):
            setattr(part, name, getattr(part, name).astype(mx.float32))
        options = {"fp16": False}
    found, took = timed(lambda: model.generate(mx.array(samples), **options))
    print(found.text)
    return took


class NumberedVocabulary:
    """Special tokens by Whisper's numbering; its text is of no interest."""

    def __init__(self, vocab: int) -> None:
        from millstream.backend.transcription.whisper.languages import LANGUAGES

        tasks = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
        languages = LANGUAGES[: vocab - 51_765 - 1]
        names = ["endoftext", "startoftranscript", *languages, *tasks]
        self._tokens = {f"<|{name}|>": 50_257 + place for place, name in enumerate(names)}

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def token(self, name: str) -> int | None:
        return self._tokens.get(name)


def random_whisper(name: str) -> Any:
    import mlx.core as mx

    from millstream.backend.device import current_device
    from millstream.backend.transcription.whisper.loading import make_whisper
    from millstream.backend.transcription.whisper.weights import Weights

    mels, width, heads, encoder, decoder, vocab = SHAPES[name]
    shape = WhisperShape(mels, 1500, width, heads, encoder, 448, heads, decoder, vocab, multilingual=True)
    device = current_device()
    dtype = mx.float32 if device.is_cpu else mx.float16
    stored = {key: random_tensor(each, dtype) for key, each in tensor_shapes(shape).items()}
    return make_whisper(shape, Weights(stored, dtype, {}), NumberedVocabulary(vocab), device, ignore_progress)


def random_tensor(shape: tuple[int, ...], dtype: Any) -> Any:
    import mlx.core as mx

    if len(shape) == 1:
        return mx.ones(shape, dtype)
    return (mx.random.normal(shape) * 0.02).astype(dtype)


def tensor_shapes(shape: WhisperShape) -> dict[str, tuple[int, ...]]:
    width = shape.width
    found: dict[str, tuple[int, ...]] = {
        "encoder.conv1.weight": (width, 3, shape.mels),
        "encoder.conv1.bias": (width,),
        "encoder.conv2.weight": (width, 3, width),
        "encoder.conv2.bias": (width,),
        "decoder.token_embedding.weight": (shape.vocab, width),
        "decoder.positional_embedding": (shape.text_positions, width),
    }
    norms = ["encoder.ln_post", "decoder.ln"]
    for part, layers in (("encoder", shape.audio_layers), ("decoder", shape.text_layers)):
        for number in range(layers):
            block = f"{part}.blocks.{number}"
            for attention in ("attn", "cross_attn") if part == "decoder" else ("attn",):
                norms.append(f"{block}.{attention}_ln")
                for name in ("query", "key", "value", "out"):
                    found[f"{block}.{attention}.{name}.weight"] = (width, width)
                    if name != "key":
                        found[f"{block}.{attention}.{name}.bias"] = (width,)
            norms.append(f"{block}.mlp_ln")
            for name, sizes in (("mlp1", (4 * width, width)), ("mlp2", (width, 4 * width))):
                found[f"{block}.{name}.weight"], found[f"{block}.{name}.bias"] = sizes, sizes[:1]
    return found | {f"{norm}.{name}": (width,) for norm in norms for name in ("weight", "bias")}


def real_time_factors(name: str, counts: Sequence[int], tokens: int) -> None:
    import mlx.core as mx

    model = random_whisper(name)
    print(f"{name}, random weights, {model.dtype}, {mx.default_device()}: {model.weight_bytes / 1e9:.2f} GB")

    def step(plan: TranscriptionPlan) -> TranscriptionResult:
        model.drop(plan.drop)
        if plan.start:
            model.start(plan.start)
            for row in model._rows.values():
                row.limit = tokens
        return model.advance()

    options = Options(language="en", temperatures=(0.0,))
    samples = 0.1 * np.random.default_rng(0).standard_normal(30 * RATE)
    for count in (1, *counts):  # the first one warms up
        facts = TranscriptionFacts(
            window_seconds=30.0,
            max_rows=max(1, min(count, model.traits.max_rows)),
            start_windows=min(count, 8),
            weight_bytes=model.weight_bytes,
            dtype=model.dtype,
            device=str(mx.default_device()),
        )
        requests = [request(number, samples, options) for number in range(count)]
        texts, took = timed(lambda facts=facts, requests=requests: run(step, facts, requests))
        written = sum(text.completion_tokens for text in texts)
        print(
            f"{count:3} windows, {facts.max_rows:2} at once: {took.wall:6.2f} s for {30 * count} s of audio: "
            f"{30 * count / took.wall:7.1f} times real time; {written} tokens"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a Whisper model")
    parser.add_argument("--audio", type=Path, help="a WAV file of 16 kHz, mono, 16 bits")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--random", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each window, with --random")
    arguments = parser.parse_args()
    load_blas(True)
    if arguments.random:
        real_time_factors(arguments.random, arguments.windows, arguments.tokens)
    elif arguments.model and arguments.audio:
        compare(arguments.model, arguments.audio, arguments.files)
    else:
        parser.error("give --model and --audio, or --random")


if __name__ == "__main__":
    main()
