"""Names that a request may carry and this server does not serve: refused, unless the value asks for nothing.

Serving a request while dropping a part of it that has a meaning would be a wrong answer with status 200. But many
clients send every field with its neutral value, and those must work.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from millstream.errors import UnknownParameter, UnsupportedParameter

Neutrals = Mapping[str, tuple[object, ...]]

UNSERVED: Neutrals = {
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
    # what other servers add
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
"""Each name with the values, besides null, that change nothing."""

UNSERVED_STREAM_OPTIONS: Neutrals = {
    "include_obfuscation": (False,),
    "continuous_usage_stats": (False,),
}


LONGEST = 64
"""Characters of an unknown name that an error repeats. Ours are shorter."""


def served(
    values: Mapping[str, object], known: Collection[str], unserved: Neutrals, *, within: str = ""
) -> dict[str, object]:
    """The values that this server acts on. Null means "not given", as in OpenAI's API, so nulls go as well."""
    for name, value in values.items():
        if name in known:
            continue
        if name not in unserved:
            raise _unknown(name, known, within)
        if value is not None and not any(_same(value, neutral) for neutral in unserved[name]):
            raise UnsupportedParameter(f"{within}{name} is not supported by this server.", param=within + name)
    return {name: value for name, value in values.items() if name in known and value is not None}


def _same(value: object, neutral: object) -> bool:
    """Equality as JSON has it: true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _unknown(name: str, known: Collection[str], within: str) -> UnknownParameter:
    if len(name) > LONGEST:  # to compare it would take time that grows with its length, and no name is like it
        name = f"{name[:LONGEST]}…"
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {within}{close[0]}?" if close else ""
    return UnknownParameter(f"{within}{name} is not a parameter of this endpoint.{hint}", param=within + name)
