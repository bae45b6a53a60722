"""A chat's gaps beside many embeddings: see `chat_gaps.py`."""

from __future__ import annotations

from pathlib import Path

import httpx

import chat_gaps
from embedding_inputs import inputs

WARM_INPUTS = 16


def chat(folder: Path, chat_folder: Path, count: int) -> None:
    async def embed(client: httpx.AsyncClient, texts: list[str]) -> None:
        reply = await client.post("/v1/embeddings", json={"model": folder.name, "input": texts})
        reply.raise_for_status()

    gaps = chat_gaps.measure(
        chat_folder,
        folder,
        lambda client: embed(client, inputs("mixed", WARM_INPUTS, -1)),
        lambda client: embed(client, inputs("mixed", count, 0)),
    )
    chat_gaps.report(gaps, f"{count} embeddings ({gaps.seconds:.0f} s, {count / gaps.seconds:.0f} per second)")
