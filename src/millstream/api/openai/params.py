"""Parameters that this server does not support: refused, unless their value has no effect.

Ignoring a parameter that has a meaning would be a wrong result with status 200. But many clients send every field with
its neutral value, and those must work.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from millstream.errors import UnknownParameter, UnsupportedParameter

Neutrals = Mapping[str, tuple[object, ...]]

UNSUPPORTED: Neutrals = {
    # OpenAI's own
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "moderation": (),
    "store": (False,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    # added by other servers
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "reasoning": (),
    "thinking": (),
    "include_reasoning": (),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "truncate_prompt_tokens": (),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "priority": (0,),
    "typical_p": (1,),
    "mirostat": (0,),
    "xtc_probability": (0,),
    "xtc_threshold": (),
    "dry_multiplier": (0,),
    "repetition_context_size": (),
    "adapters": (),
    "draft_model": (),
    "num_draft_tokens": (),
    "mm_processor_kwargs": (),
}
"""Each name with the values, besides null, that have no effect."""

UNSUPPORTED_STREAM_OPTIONS: Neutrals = {
    "include_obfuscation": (False,),
    "continuous_usage_stats": (False,),
}


MAX_QUOTED = 64
"""Characters of an unknown name that an error quotes. Names of ours are shorter."""


def supported(
    values: Mapping[str, object], known: Collection[str], unsupported: Neutrals, *, prefix: str = ""
) -> dict[str, object]:
    """Returns the supported parameters. Raises on others, unless their value is neutral. Null means "not given", as in
    OpenAI's API, so nulls are left out."""
    for name, value in values.items():
        if name in known:
            continue
        if name not in unsupported:
            raise _unknown(name, known, prefix)
        if value is not None and not any(_same(value, neutral) for neutral in unsupported[name]):
            raise UnsupportedParameter(f"{prefix}{name} is not supported by this server.", param=prefix + name)
    return {name: value for name, value in values.items() if name in known and value is not None}


def _same(value: object, neutral: object) -> bool:
    """Equality as in JSON: true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _unknown(name: str, known: Collection[str], prefix: str) -> UnknownParameter:
    if len(name) > MAX_QUOTED:  # comparing takes time that grows with the length, and no name of ours is that long
        name = f"{name[:MAX_QUOTED]}…"
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {prefix}{close[0]}?" if close else ""
    return UnknownParameter(f"{prefix}{name} is not a parameter of this endpoint.{hint}", param=prefix + name)
