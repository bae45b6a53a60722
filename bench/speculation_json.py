"""Structured output with speculative decoding and without, in turns on one server: what forced tokens save.

    python bench/speculation_json.py --model demo

Two forms: a JSON schema with long keys, and a required tool call. Each prompt runs with and without `speculation`, in
turns, so that other load on the machine affects both. The texts must be equal. Prints seconds of whole requests (their
prompts are cached), the ratio, and how many drafted tokens were right.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from typing import Any
from urllib.parse import SplitResult, urlsplit

import servers
from millstream.bench.client import Sample, stream
from models import find
from targets import Failure, checked

PATH = "/v1/chat/completions"
KEYS: dict[str, dict[str, Any]] = {
    "customer_identification_number": {"type": "integer", "minimum": 1, "maximum": 99999},
    "preferred_communication_channel": {"enum": ["email", "telephone", "letter"]},
    "estimated_delivery_date_and_time": {"type": "string", "maxLength": 20},
    "is_international_shipment": {"type": "boolean"},
    "special_handling_instructions": {"type": "string", "maxLength": 24},
    "total_weight_in_kilograms": {"type": "number", "minimum": 0, "maximum": 999},
    "recipient_contact_information": {"type": "string", "maxLength": 24},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": KEYS,
    "required": list(KEYS),
    "additionalProperties": False,
}
ORDERS = (
    "Order 4411 of Mrs. Lang: two lamps, 3.5 kg, fragile, to Vienna, mail her at lang@home.at when it is on its way.",
    "Mr. Ortiz, customer 902, wants his chair, 12 kg, on Friday; call him at 555-0182. It goes to Lima.",
    "Please send the books (1.2 kg) to Ms. Ito, no. 77, in Osaka by letter post, keep dry, before Monday noon.",
)
TOOL = {
    "type": "function",
    "function": {"name": "register_international_shipment", "parameters": SCHEMA},
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}},
    "tool": {"tools": [TOOL], "tool_choice": "required"},
}


def body(order: str, form: str, speculation: bool, temperature: float) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"Describe this order as JSON. {order}"}],
        "max_tokens": 256,
        "temperature": temperature,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": speculation,
        **FORMS[form],
    }


async def measure(url: SplitResult, form: str, streams: int, rounds: int, temperature: float) -> None:
    """Prints one line."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    accepted = rejected = tokens = 0
    for turn in range(-1, rounds):  # the first one fills the prefix cache, and the drafter learns the model's habits
        texts: dict[bool, list[str]] = {}
        for on in (True, False) if turn % 2 else (False, True):
            bodies = [body(ORDERS[number % len(ORDERS)], form, on, temperature) for number in range(streams)]
            samples = checked(await asyncio.gather(*(stream(url, PATH, each) for each in bodies)))
            texts[on] = ["".join(sample.text) for sample in samples]
            if turn >= 0:
                taken[on].append(_seconds(samples))
                tokens += 0 if on else sum(sample.tokens for sample in samples)
                accepted += sum(sample.accepted_tokens for sample in samples)
                rejected += sum(sample.rejected_tokens for sample in samples)
        if texts[True] != texts[False]:
            raise Failure(f"{form}: the texts differ")
    off, on_ = statistics.median(taken[False]), statistics.median(taken[True])
    share = accepted / max(1, accepted + rejected)
    print(
        f"{form:<7} {streams:>2} streams: off {off:6.2f} s, on {on_:6.2f} s, {off / on_:5.2f} times; "
        f"{tokens / rounds:.0f} tokens per round, {accepted} of {accepted + rejected} drafted right ({share:.0%})",
        flush=True,
    )


def _seconds(samples: list[Sample]) -> float:
    return max(sample.ended for sample in samples) - min(sample.started for sample in samples)


async def run(url: SplitResult, arguments: argparse.Namespace) -> None:
    for streams in arguments.streams:
        for form in arguments.forms.split(","):
            await measure(url, form, streams, arguments.rounds, arguments.temperature)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--forms", default="schema", help="schema, or tool: a function that must be called")
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.url:
        asyncio.run(run(urlsplit(arguments.url), arguments))
    else:
        with servers.running("millstream", find(arguments.model)) as url:
            asyncio.run(run(urlsplit(url), arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
