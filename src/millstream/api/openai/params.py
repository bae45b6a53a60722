"""Parameters of OpenAI's API, and of servers like it, that this server ignores or does not support."""

from __future__ import annotations

from millstream.api.params import Neutrals

IGNORED = frozenset(
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
        # Details of sampling methods that are refused below, and of penalties, which cover the whole text here
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "mirostat_eta",
        "mirostat_tau",
        "repeat_last_n",
        "repetition_context_size",
        "xtc_threshold",
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

UNSUPPORTED: Neutrals = {
    # OpenAI's own
    "messages": ([],),
    "prompt": ("", []),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "max_output_tokens": (),
    # added by other servers
    "guided_whitespace_pattern": (),
    "format": ("",),
    "max_length": (),
    "chat_template": (),
    "documents": ([],),
    "add_special_tokens": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "n_probs": (0,),
    "samplers": ("", []),
    "reasoning_format": ("auto", "deepseek", "parsed"),
    "reasoning_in_content": (False,),
    "adapters": (),
    "lora": ([],),
    "mm_processor_kwargs": ({},),
}
"""Each name with the values, besides null, that have no effect."""

IGNORED_STREAM_OPTIONS = frozenset({"include_obfuscation", "continuous_usage_stats"})
