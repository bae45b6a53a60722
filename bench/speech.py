"""Synthesis by Kokoro: seconds of sound per second, alone and in batches, and beside mlx-audio as it comes.

    python bench/speech.py                              random weights of Kokoro-82M's shape, any device
    python bench/speech.py --folder Kokoro-82M          real ones
    python bench/speech.py --folder Kokoro-82M --mlx-audio "Hello."

mlx-audio takes half a minute for a second of sound on a CPU, so its text should be very short. Both speak the same
phonemes with the same voice in the same process, ours first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

TEXT = "The mill stands by the stream, and its wheel has turned for three hundred years without a single day of rest."
SHAPE: dict[str, Any] = {
    "istftnet": {
        "upsample_kernel_sizes": [20, 12],
        "upsample_rates": [10, 6],
        "gen_istft_hop_size": 5,
        "gen_istft_n_fft": 20,
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "resblock_kernel_sizes": [3, 7, 11],
        "upsample_initial_channel": 512,
    },
    "hidden_dim": 512,
    "max_dur": 50,
    "n_layer": 3,
    "n_token": 178,
    "style_dim": 128,
    "text_encoder_kernel_size": 5,
    "plbert": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
        "max_position_embeddings": 512,
        "num_hidden_layers": 12,
    },
    "vocab": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a Kokoro folder; without it, random weights of its shape")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--voice", default="af_heart")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default=None, help="of random weights: float32, float16 or bfloat16")
    parser.add_argument("--device", default=None, choices=["cpu"])
    parser.add_argument("--mlx-audio", metavar="TEXT", help="speak this text with mlx-audio as it comes as well")
    options = parser.parse_args()

    from millstream.backend.environment import load_blas

    blas = load_blas(True)
    import mlx.core as mx

    from millstream.backend.device import current_device, use_device

    use_device(options.device)
    device = current_device()
    speak, sizes = _ours(options, device)
    print(f"device: {device.kind} ({device.name}), {blas or 'no BLAS loaded'}, MLX {mx.__version__}, {sizes}")
    for count in options.batches:
        speak(options.text, count)  # compiles
        seconds, sound = _best(lambda count=count: speak(options.text, count), options.runs)
        print(
            f"ours, {count} at once: {sound:.2f} s of sound in {seconds:.3f} s: "
            f"{sound / seconds:.2f} times real time, real-time factor {seconds / sound:.4f}"
        )
    if options.mlx_audio:
        ours, sound = _best(lambda: speak(options.mlx_audio, 1), options.runs)
        theirs, their_sound = _mlx_audio(options)
        print(f"{options.mlx_audio!r}: ours {ours:.3f} s for {sound:.2f} s of sound")
        print(f"{options.mlx_audio!r}: mlx-audio {theirs:.3f} s for {their_sound:.2f} s of sound")
        print(f"ours is {theirs / ours:.1f} times faster")


def _best(work: Callable[[], float], runs: int) -> tuple[float, float]:
    times = []
    sound = 0.0
    for _ in range(runs):
        started = time.perf_counter()
        sound = work()
        times.append(time.perf_counter() - started)
    return min(times), sound


def _ours(options: argparse.Namespace, device: Any) -> tuple[Callable[[str, int], float], str]:
    """Speaks a text so many times in one batch; returns the seconds of sound of all."""
    import mlx.core as mx

    from millstream.backend.speech.kokoro.network import Kokoro
    from millstream.backend.speech.loading import load_speaker
    from millstream.backend.speech.settings import SpeechSettings
    from millstream.engine.speech.messages import Piece
    from millstream.engine.speech.plan import PieceInput
    from millstream.models.kokoro_config import SAMPLE_RATE, read_kokoro_config
    from millstream.models.speech_layout import read_speech_layout

    if options.folder is not None:
        speaker = load_speaker(SpeechSettings(options.folder, read_speech_layout(options.folder)), device)

        def speak(text: str, count: int) -> float:
            tokens = np.array(_tokens(options.folder, text), np.int32).tobytes()
            pieces = [PieceInput(number, 0, Piece(tokens), ((options.voice, 1.0),)) for number in range(count)]
            return sum(len(samples) for samples in next(speaker.speak(pieces))) / SAMPLE_RATE

        return speak, f"{options.folder.name} in {speaker.dtype}"

    from support.tiny_kokoro import kokoro_weights

    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "config.json").write_text(json.dumps(SHAPE))
        config = read_kokoro_config(Path(work))
    weights = kokoro_weights(0, SHAPE, decoder=1024, text=64)
    dtype = getattr(mx, options.dtype or ("float32" if device.is_cpu else "bfloat16"))
    # Random durations are all alike: half of the chances of 50 are too many, so lower them to those of speech.
    weights["predictor.duration_proj.linear_layer.weight"][:] = 0
    weights["predictor.duration_proj.linear_layer.bias"][:] = -2.75
    network = Kokoro({name: mx.array(values) for name, values in weights.items()}, config, dtype)
    mx.eval(network.weights)
    styles = mx.random.normal((1, 256)) * 0.1

    def speak_random(text: str, count: int) -> float:
        tokens = np.array([0, *(1 + np.arange(len(text)) % 170), 0], np.int32)
        found = network([tokens] * count, mx.repeat(styles, count, axis=0), [1.0] * count)
        return sum(len(samples) for samples in found) / SAMPLE_RATE

    return speak_random, f"random weights of Kokoro-82M's shape in {options.dtype or str(dtype)}"


def _tokens(folder: Path, text: str) -> tuple[int, ...]:
    from millstream.models.kokoro_config import read_kokoro_config
    from millstream.text.speech.english import EnglishPhonemes

    vocab = read_kokoro_config(folder).vocab
    return tuple(vocab[symbol] for symbol in EnglishPhonemes()(text) if symbol in vocab)


def _mlx_audio(options: argparse.Namespace) -> tuple[float, float]:
    """mlx-audio's model, loaded the way it loads it, with the same phonemes and voice."""
    import mlx.core as mx
    from mlx_audio.tts.models.kokoro import Model, ModelConfig

    from millstream.models.kokoro_config import SAMPLE_RATE, read_kokoro_config
    from millstream.text.speech.english import EnglishPhonemes

    config = json.loads((options.folder / "config.json").read_text())
    model = Model(ModelConfig(**{**config, "model_path": str(options.folder)}))
    weights: dict[str, mx.array] = {}
    for path in options.folder.glob("*.safetensors"):
        weights |= mx.load(str(path))
    model.load_weights(list(model.sanitize(weights).items()), strict=False)
    model.eval()
    vocab = read_kokoro_config(options.folder).vocab
    phonemes = "".join(symbol for symbol in EnglishPhonemes()(options.mlx_audio) if symbol in vocab)
    (voice,) = mx.load(str(options.folder / "voices" / f"{options.voice}.safetensors")).values()
    started = time.perf_counter()
    sound = model(phonemes, voice[len(phonemes) - 1], 1.0)
    mx.eval(sound)
    return time.perf_counter() - started, sound.size / SAMPLE_RATE


if __name__ == "__main__":
    main()
