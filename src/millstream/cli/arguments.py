"""Types of command line arguments, with errors that say what would be right."""

from __future__ import annotations

import argparse


def port(text: str) -> int:
    return whole(text, 0, 65535)


def positive(text: str) -> int:
    return whole(text, 1, 2**40)


def natural(text: str) -> int:
    return whole(text, 0, 2**40)


def whole(text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 86400")
    return value
