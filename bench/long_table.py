"""The results of bench/long_contexts.py as a Markdown table: a line per figure, a column per server."""

from __future__ import annotations

from collections.abc import Sequence

from long_rows import Sizes

Results = dict[str, dict[str, dict[str, float | str | None]]]
"""Row, server, figure."""

Line = tuple[str, str, str]
"""A label, the name of a figure, and its unit."""

LINES: dict[str, tuple[Line, ...]] = {
    "join": (
        (
            "{join_streams} short streams, then one of {join_prompt:,} tokens: KV cache over what its tokens need",
            "kv_over_tokens",
            "times",
        ),
        ("its size", "kv_bytes", "bytes"),
        ("KV cache and prefix cache over what the tokens need", "kv_and_cache_over_tokens", "times"),
        ("tokens held", "tokens_held", ""),
        ("gap before, median", "gap_before_p50", "ms"),
        ("gap while it is prefilled, p99", "gap_during_p99", "ms"),
        ("gap after, median", "gap_after_p50", "ms"),
        ("its first token", "first", "s"),
    ),
    "queue": (
        ("{prompt:,} tokens, {count} at once: first token, median", "first_p50", "s"),
        ("{count} at once: first token, p99", "first_p99", "s"),
        ("{count} at once: prefill, tokens/s", "prefill_tokens_per_second", ""),
    ),
    "beside": (
        ("{beside_streams} streams: gap alone, median", "gap_alone_p50", "ms"),
        ("gap beside one prompt of {prompt:,} tokens, p99", "gap_beside_p99", "ms"),
        ("p99 beside over median alone", "beside_over_alone", "times"),
        ("first token of that prompt, median", "first_p50", "s"),
    ),
    "short": (("{short_streams} short streams: tokens/s", "tokens_per_second", ""),),
}
ORDER = ("join", "queue", "beside", "short")


def table(results: Results, sizes: Sizes, servers: Sequence[str]) -> str:
    """With `before` among the servers, the last column is the ratio of Millstream to it."""
    ratios = "before" in servers
    lines = [["", *servers, *(["millstream / before"] if ratios else [])]]
    for row, name in rows_of(results):
        found = results[row]
        for label, key, unit in LINES[name]:
            text = label.format(count=row.partition(" ")[2], **_fields(sizes))
            cells = [_cell(found.get(server), key, unit) for server in servers]
            lines.append([text, *cells, *([_ratio(found, key)] if ratios else [])])
    rule = ["---"] * len(lines[0])
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


def rows_of(results: Results) -> list[tuple[str, str]]:
    """The measured rows and their kinds, in the order of the table: `queue 8` is a row of the kind `queue`."""
    return [(row, kind) for kind in ORDER for row in results if row.partition(" ")[0] == kind]


def _fields(sizes: Sizes) -> dict[str, object]:
    return {name: getattr(sizes, name) for name in Sizes.__slots__}


def _cell(figures: dict[str, float | str | None] | None, key: str, unit: str) -> str:
    if figures is None:
        return ""
    if "error" in figures:
        return "failed"
    value = figures.get(key)
    if not isinstance(value, int | float):
        return "-"
    return quantity(value, unit)


def quantity(value: float, unit: str) -> str:
    """Three digits, or all of a large number. Times come in milliseconds."""
    if unit == "s":
        value /= 1000
    elif unit == "bytes":
        size, unit = byte_unit(value)
        value /= size
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def byte_unit(most: float) -> tuple[int, str]:
    """A unit for amounts of up to so many bytes, and its size."""
    return (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")


def _ratio(found: dict[str, dict[str, float | str | None]], key: str) -> str:
    ours, before = (found.get(name, {}).get(key) for name in ("millstream", "before"))
    if not isinstance(ours, int | float) or not isinstance(before, int | float) or not before:
        return ""
    return f"{ours / before:.2f}"
