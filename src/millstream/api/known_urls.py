"""What to say about a URL that is not served: what the server has instead, or which URL was meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

CHAT, TEXT, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
_CUTOFF = 0.75

_FOREIGN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (r"/v1/embeddings|/api/embed(dings)?|/embeddings?", "embeddings", ()),
    (r"(/v1)?/(re)?rank(ing)?|/v2/rerank|(/v1)?/score", "reranking", ()),
    (r"/v1/(images|videos)/.*|/sdapi/.*", "generation of images or video", ()),
    (r"/v1/realtime.*", "realtime sessions", (CHAT,)),
    (r"/v1/moderations", "moderation", ()),
    (r"/v1/(assistants|threads|conversations)(/.*)?", "assistants and stored threads", ("/v1/responses", CHAT)),
    (r"/v1/(files|batches|uploads|fine_tuning|vector_stores|containers|evals)(/.*)?", "stored files and jobs", ()),
    (r"/v1/complete", "Anthropic's text completions", ("/v1/messages", CHAT)),
    (r"/v1/messages/count_tokens", "token counts", ()),
    (r"/v1/messages(/.*)?", "Anthropic's messages", (CHAT,)),
    (r"/v1/responses(/.*)?", "OpenAI's responses", (CHAT,)),
    (r"/api/(v0|v1)/chat(/completions)?", "LM Studio's own API", (CHAT,)),
    (r"/api/(v0|v1)/completions", "LM Studio's own API", (TEXT,)),
    (r"/api/(v0|v1)/models(/.*)?", "LM Studio's own API", (MODELS,)),
    (r"/api/chat", "Ollama's chat", (CHAT,)),
    (r"/api/generate", "Ollama's generate", (TEXT,)),
    (r"/api/(tags|show|ps)", "Ollama's list of models", (MODELS,)),
    (r"/api/(pull|push|create|copy|delete|blobs/.*)", "Ollama's store of models", (MODELS,)),
    (r"/api/version|/version", "a version route", ("/",)),
    (r"/completion|/generate(_stream)?|/api/v1/generate", "this form of text completion", (TEXT,)),
    (r"/infill|/v1/fim/completions", "this form of filling in the middle", (TEXT,)),
    (r"/chat|/v1/chat|/v1/chat/completion", "a route of this name", (CHAT,)),
    (r"/apply-template|/tokenize|/detokenize", "tokenisation", ("/v1/messages/count_tokens",)),
    (r"/props|/info|/v1/internal/.*", "a route about the model", (MODELS,)),
    (r"/slots(/.*)?|/load|/server_info", "a route about its slots", ("/metrics",)),
    (r"/ping|/healthz|/livez|/readyz|/v1/health|/api/health", "a route of this name", ("/health",)),
    (r"/v1beta/.*", "Google's API", (CHAT,)),
    (r"/openai/.*", "deployments", (CHAT,)),
)
"""Endpoints of other servers: the path, what it is, and what serves the same here, the best first."""
_KNOWN = tuple((re.compile(path), what, instead) for path, what, instead in _FOREIGN)


def hint(path: str, served: Collection[str]) -> str:
    """Returns a sentence about an unknown path, or nothing. `served` are the paths of the app's routes."""
    if path.startswith("/v1/v1/") and (meant := path.removeprefix("/v1")) in served:
        return f"Did you mean {meant}? The base URL of a client has /v1 only once. "
    for pattern, what, instead in _KNOWN:
        if pattern.fullmatch(path):
            use = next((each for each in instead if each in served), None)
            return f"This server does not have {what}. " + (f"Use {use}. " if use else "")
    plain = [each for each in served if "{" not in each]
    close = difflib.get_close_matches(path[:100], plain, n=1, cutoff=_CUTOFF)
    return f"Did you mean {close[0]}? " if close else ""
