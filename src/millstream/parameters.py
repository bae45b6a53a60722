"""Every parameter that changes what is generated: the one list for all dialects, the configuration and model files.

A dialect takes its fields from `PARAMETERS` and refuses what is in `REFUSED`, so that none drops in
silence what another one serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NO_LIMIT = 2**31 - 1
"""As a token limit: none but the context."""
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. `name` is the field of `Sampling` or `GenerationRequest` that it sets."""

    name: str
    kind: Literal["number", "integer", "flag", "stops", "tokens", "bias", "prediction"]
    help: str
    low: float = 0
    high: float = NO_LIMIT
    neutral: object = None
    """The value without effect, besides null."""
    names: tuple[str, ...] = ()
    """Its names in requests, if it has another or several."""

    @property
    def all_names(self) -> tuple[str, ...]:
        return self.names or (self.name,)

    def accepts(self, value: object) -> bool:
        """For numbers and integers."""
        kinds = {int} if self.kind == "integer" else {int, float}
        return type(value) in kinds and self.low <= value <= self.high  # type: ignore[operator]


PARAMETERS = (
    Parameter(
        "temperature",
        "number",
        "0 always picks the most likely token; higher values are more varied. Default: the model's, else 1.",
        high=2,
    ),
    Parameter(
        "top_p",
        "number",
        "Sample from the most likely tokens that together reach this probability. 0: from the most likely one.",
        high=1,
        neutral=1,
    ),
    Parameter(
        "top_k", "integer", "Sample from this many of the most likely tokens. 0 or -1 disables it.", low=-1, neutral=0
    ),
    Parameter(
        "min_p",
        "number",
        "Exclude tokens whose probability is below this fraction of the most likely token's.",
        high=1,
        neutral=0,
    ),
    Parameter(
        "seed",
        "integer",
        "The same seed and parameters sample the same tokens. -1, as without it: a random seed.",
        low=-_INT64,
        high=_INT64 - 1,
        neutral=-1,
    ),
    Parameter(
        "repetition_penalty",
        "number",
        "Above 1: tokens that are in the prompt or the output already become less likely, by division.",
        low=0.01,
        high=10,
        neutral=1,
        names=("repetition_penalty", "repeat_penalty"),
    ),
    Parameter(
        "presence_penalty",
        "number",
        "Above 0: tokens that were generated before become less likely, by a fixed amount.",
        low=-2,
        high=2,
        neutral=0,
    ),
    Parameter(
        "frequency_penalty",
        "number",
        "Above 0: tokens that were generated before become less likely, with each occurrence.",
        low=-2,
        high=2,
        neutral=0,
    ),
    Parameter(
        "repeat_last_n",
        "integer",
        "0 disables the three penalties. Any other value has no effect: penalties look at all tokens.",
        low=-1,
        neutral=-1,
    ),
    Parameter(
        "logit_bias",
        "bias",
        "Added to the logits of tokens, by token id: -100 bans a token, 100 all but forces it.",
        neutral={},
    ),
    Parameter(
        "max_tokens",
        "integer",
        "Maximum number of tokens per answer, reasoning included. -1: no limit but the context length, as without it "
        "unless the model has a default.",
        low=-1,
        neutral=-1,
        names=(
            "max_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "max_new_tokens",
            "n_predict",
            "num_predict",
        ),
    ),
    Parameter(
        "min_tokens",
        "integer",
        "The answer does not end by itself before it has this many tokens. Stop strings count from there on.",
        neutral=0,
    ),
    Parameter(
        "stop",
        "stops",
        "Stop strings: the answer ends before the first of them.",
        neutral=[],
        names=("stop", "stop_sequences"),
    ),
    Parameter("stop_token_ids", "tokens", "Token ids that end the answer, besides the model's own.", neutral=[]),
    Parameter("ignore_eos", "flag", "Continue past the end-of-text token, up to the token limit.", neutral=False),
    Parameter(
        "prediction",
        "prediction",
        'What the answer will mostly be, such as the file that it edits: {"type": "content", "content": text}. Where '
        "it is right, tokens come several at a time. It never changes the answer.",
    ),
    Parameter(
        "speculate",
        "flag",
        "False: no speculative decoding for this request. It changes how fast tokens come, never which.",
        neutral=True,
        names=("speculation",),
    ),
    Parameter(
        "spec_prefill",
        "flag",
        "Where the server reads long prompts in part (--spec-prefill): false to read all of this one, true to read it "
        "in part even if it has tools. Without it, prompts with tools are read as a whole.",
    ),
)
BY_NAME = {row.name: row for row in PARAMETERS}
NAMES = {name: row.name for row in PARAMETERS for name in row.all_names}
"""What each name in requests stands for."""
MODEL_DEFAULTS = tuple(
    BY_NAME[name]
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
)
"""What a model may have a default for."""

REFUSED: dict[str, tuple[object, ...]] = {
    # Methods of sampling that this server does not have, and details of theirs that matter alone
    **dict.fromkeys(("mirostat", "mirostat_mode", "dynatemp_range", "xtc_probability", "dry_multiplier"), (0,)),
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "min_length"), (0,)),
    **dict.fromkeys(("encoder_repetition_penalty", "length_penalty", "num_beams"), (1,)),
    **dict.fromkeys(("typical_p", "tfs_z"), (0, 1)),
    **dict.fromkeys(("early_stopping", "use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("logits_processors", "bad_words", "lora", "documents"), ([],)),
    **dict.fromkeys(("allowed_token_ids", "max_length", "adapters", "chat_template"), ()),
    **dict.fromkeys(("add_special_tokens", "truncate_prompt_tokens"), ()),
    "top_n_sigma": (-1, 0),
    "samplers": ("", []),
    "mm_processor_kwargs": ({},),
    # What only some endpoints have room for in their answers
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("echo", "return_token_ids", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("top_logprobs", "n_probs"), (0,)),
    "logprobs": (False, 0),
    "prompt_logprobs": (),
    "suffix": ("",),
    # Structured output, which has another name in endpoints that do not take these
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ("",)),
    **dict.fromkeys(("json_schema", "regex", "grammar"), ("",)),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_whitespace_pattern": (),
}
"""What an endpoint without a field of this name refuses: each with the values, besides null, that have no effect."""

REFUSED_THINKING: dict[str, tuple[object, ...]] = {
    "reasoning_effort": (),
    "thinking_budget": (),
    "enable_thinking": (),
    "include_reasoning": (True,),
    "chat_template_kwargs": ({},),
}
"""The same for endpoints of conversations that have other names for how much to reason."""

IGNORED = frozenset(
    {
        *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"),
        *("mirostat_eta", "mirostat_tau", "repetition_context_size", "xtc_threshold"),
    }
)
"""Details of methods that are refused, and of penalties, which cover the whole text here."""
