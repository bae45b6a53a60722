"""Write the report of `millstream bench --report`: tables for people and the same as JSON, in one Markdown file.

It is meant to be attached to a public issue, so it names devices and versions, and no paths, hosts, users or keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from millstream.bench.report import milliseconds

_MODEL_FIELDS = (
    "id", "family", "quantization", "device", "isolation", "weight_bytes", "memory_bytes", "kv_bytes_per_token",
    "max_batch", "context_length", "capabilities", "notes", "calibration",
)  # fmt: skip
_PATH = re.compile(r"(?<![\w.:/-])(?:~|[A-Za-z]:)?[/\\][^\s,;()'\"]+|file://\S+")
"""An absolute path. Names with a slash in the middle, such as org/model, are none."""


def model_facts(model: Mapping[str, Any]) -> dict[str, Any]:
    """What the report tells of a model that `/v1/models` lists."""
    return {name: _scrubbed(model[name]) for name in _MODEL_FIELDS if name in model}


def report_text(machine: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """`runs`: each has `options`, `model` and `figures`."""
    machine = _scrubbed(machine)
    lines = ["# Millstream benchmark report", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in machine.items()]
    for one in runs:
        lines += ["", *_run_lines(one)]
    content = {"report": 1, "machine": machine, "runs": [dict(one) for one in runs]}
    lines += ["", "## Data", "", "```json", orjson.dumps(content, option=orjson.OPT_INDENT_2).decode(), "```", ""]
    return "\n".join(lines)


def save_report(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _run_lines(one: Mapping[str, Any]) -> list[str]:
    model, figures = one["model"], one["figures"]
    options = f" ({one['options']})" if one.get("options") else ""
    lines = [f"## {model.get('id', 'model')}{options}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in model.items() if name not in ("id", "calibration")]
    lines += ["", *_levels(figures.get("levels", []))]
    if calibration := model.get("calibration"):
        chunks = ", ".join(f"{chunk['tokens']}: {_ms(chunk['seconds'])}" for chunk in calibration["chunks"])
        steps = ", ".join(f"{step['rows']}: {_ms(step['seconds'])}" for step in calibration["steps"])
        lines += ["", f"Calibration: chunks by tokens {chunks}; decode steps by rows {steps}."]
    for prompt in figures.get("prefill", []):
        lines += ["", f"Prefill of {prompt['tokens']} tokens alone: {_ms(prompt['seconds'])}, "
                      f"{prompt['tokens_per_second']:,.0f} tokens/s."]  # fmt: skip
    if cache := figures.get("prefix_cache"):
        lines += ["", f"Prefix cache, {cache['tokens']} tokens: first token after {_ms(cache['cold_seconds'])} cold, "
                      f"{_ms(cache['warm_seconds'])} warm ({cache['cached_tokens']} tokens cached)."]  # fmt: skip
    if beside := figures.get("beside_long_prompt"):
        lines += [
            "",
            f"A prompt of {beside['prompt_tokens']} tokens beside {beside['streams']} streams: its first token after "
            f"{_ms(beside['first_seconds'])} (alone {_ms(beside['first_seconds_alone'])}); gaps of the streams p50 "
            f"{milliseconds(beside['gap_p50_before'])} before, {milliseconds(beside['gap_p50_during'])} during, p99 "
            f"{milliseconds(beside['gap_p99_during'])}, largest {milliseconds(beside['gap_max_during'])}.",
        ]
    return lines


def _levels(levels: Sequence[Mapping[str, Any]]) -> list[str]:
    times = ("first_p50", "first_p99", "gap_p50", "gap_p99", "health_p99")
    lines = ["| streams | tokens/s | first p50 | first p99 | gap p50 | gap p99 | health p99 | errors |"]
    lines.append("|" + "---:|" * 8)
    for level in levels:
        cells = [
            f"{level['streams']}",
            f"{level['tokens_per_second']:,.1f}",
            *(milliseconds(level[name]) for name in times),
        ]
        lines.append("| " + " | ".join([*cells, str(level["errors"])]) + " |")
    return lines


def _ms(seconds: float | None) -> str:
    return milliseconds(None if seconds is None else seconds * 1000)


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value)).replace("|", "/") or "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).replace("|", "/")


def _scrubbed(value: Any) -> Any:
    """Without absolute paths."""
    if isinstance(value, str):
        return _PATH.sub("(path)", value)
    if isinstance(value, Mapping):
        return {name: _scrubbed(each) for name, each in value.items()}
    return [_scrubbed(each) for each in value] if isinstance(value, list | tuple) else value
