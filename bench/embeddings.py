"""Embeddings per second: requests of many inputs, against mlx-vlm's own server and a loop over single inputs.

    python bench/embeddings.py FOLDER                        an embedding model, such as all-MiniLM-L6-v2
    python bench/embeddings.py bert-base                     random weights of a real shape: see encoder_shapes.py
    python bench/embeddings.py FOLDER --chat random-tiny     a chat's gaps, alone and beside 2,000 embeddings
    python bench/embeddings.py --device                      without HTTP: the share of the device's peak
    python bench/embeddings.py bert-tiny --device --quick         the same in a few seconds, to try it

`--device` needs only mlx, mlx-lm, numpy, tokenizers and Millstream's source.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from encoder_shapes import SHAPES, make_encoder

CASES = (("mixed", 1), ("mixed", 8), ("mixed", 64), ("mixed", 256), ("short", 64), ("long", 64))
DEVICE_MODELS = (("bert-base", "bfloat16"), ("qwen3-0.6b", None), ("bert-base", None))


def _cases(text: str) -> list[tuple[str, int]]:
    pairs = (case.split(":") for case in text.split(","))
    return [(mix, int(count)) for mix, count in pairs]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help=f"a folder, or one of {', '.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", type=_cases, default=list(CASES), help="such as mixed:64,short:8")
    parser.add_argument(
        "--peer-preload", metavar="LIBRARY", help="a BLAS for mlx-vlm's server, which brings none on Linux"
    )
    parser.add_argument("--no-peer", action="store_true", help="without mlx-vlm's server")
    parser.add_argument("--chat", metavar="MODEL", help="measure this chat model's gaps instead")
    parser.add_argument("--count", type=int, default=2000, help="embeddings beside the chat")
    parser.add_argument("--device", action="store_true", help="measure the share of the device's peak instead")
    parser.add_argument("--quick", action="store_true", help="with --device: few inputs")
    parser.add_argument("--disable", default="", help="with --device: fast paths to leave out, such as calibration")
    return parser


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.device:  # the other parts need an HTTP client, which this one does without
        import embedding_device

        if arguments.model not in (None, *SHAPES):
            parser.error(f"--device takes one of {', '.join(SHAPES)}")
        models = DEVICE_MODELS if arguments.model is None else ((arguments.model, None),)
        disabled = frozenset(filter(None, arguments.disable.split(",")))
        embedding_device.measure(models, quick=arguments.quick, disabled=disabled)
        return 0
    if arguments.model is None:
        parser.error("name a model")
    folder = make_encoder(arguments.model) if arguments.model in SHAPES else Path(arguments.model)
    if arguments.chat:
        import embedding_gaps
        import models as chat_models

        embedding_gaps.chat(folder, chat_models.find(arguments.chat), arguments.count)
    else:
        import embedding_rates

        peer = not arguments.no_peer
        embedding_rates.compare(folder, arguments.cases, arguments.rounds, peer, arguments.peer_preload)
    return 0


if __name__ == "__main__":
    sys.exit(main())
