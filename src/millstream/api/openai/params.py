"""Parameters of OpenAI's API, and of servers like it, that this server ignores or does not support."""

from __future__ import annotations

from millstream.api.params import Neutrals
from millstream.parameters import IGNORED as DETAILS
from millstream.parameters import REFUSED

IGNORED = DETAILS | frozenset(
    {
        # Who asks, what is stored, and how OpenAI runs it
        "user",
        "metadata",
        "safety_identifier",
        "service_tier",
        "store",
        "moderation",
        "prompt_cache_key",
        "prompt_cache_retention",
        # Hints that a model here cannot take, and what is offered by other means
        "verbosity",
        "web_search_options",
        # How other servers run it
        "cache_prompt",
        "cache_salt",
        "draft_model",
        "guided_decoding_backend",
        "id_slot",
        "keep_alive",
        "models",
        "n_keep",
        "num_ctx",
        "num_draft_tokens",
        "num_keep",
        "options",
        "plugins",
        "priority",
        "provider",
        "request_id",
        "response_fields",
        "return_progress",
        "route",
        "skip_special_tokens",
        "slot_id",
        "speculative.n_max",
        "speculative.n_min",
        "speculative.p_min",
        "spaces_between_special_tokens",
        "timings_per_token",
        "transforms",
        # Parameters of conversations, which a text to continue does not have
        "chat_template_kwargs",
        "enable_thinking",
        "include_reasoning",
        "parallel_tool_calls",
        "reasoning",
        "reasoning_effort",
        "thinking",
        "thinking_budget",
    }
)
"""Names of parameters that cannot change what is generated here, unless an endpoint serves them."""

UNSUPPORTED: Neutrals = REFUSED | {
    # OpenAI's own
    "messages": ([],),
    "prompt": ("", []),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    # added by other servers
    "format": ("",),
    "reasoning_format": ("auto", "deepseek", "parsed"),
    "reasoning_in_content": (False,),
}
"""Each name with the values, besides null, that have no effect."""

IGNORED_STREAM_OPTIONS = frozenset({"include_obfuscation", "continuous_usage_stats"})
