"""The drafter of what grammars force: its drafts follow the grammar, and it learns how the model writes the rest."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers
from llguidance import LLMatcher

from millstream.backend.generation.drafters.grammar import MAX_HABITS, MAX_PLACES, GrammarDrafter, Habits
from millstream.engine.generation.messages import Generate
from millstream.text.grammars.grammar import GrammarCompiler
from millstream.text.tokenizer import Tokenizer
from millstream.types import Grammar

KEYS = ("customer_identification", "preferred_channel", "estimated_delivery")
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {key: {"type": "string", "maxLength": 9} for key in KEYS},
            "required": list(KEYS),
            "additionalProperties": False,
        }
    ),
)
ANSWER = '{"customer_identification": "abc", "preferred_channel": "mail", "estimated_delivery": "soon"}'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, and a few merges as of English JSON."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([ANSWER, 'a "word", and: "more", in "a": "text"'] * 3, trainer)
    end = backend.token_to_id("<eos>")
    return Tokenizer(backend, eos_token="<eos>", eos_ids=(end,))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer)


class Row:
    """A row that answers a given text, with a drafter that may propose."""

    def __init__(self, tokenizer: Tokenizer, matcher: LLMatcher, drafter: GrammarDrafter, answer: str) -> None:
        self.matcher = matcher
        self.tokens = tokenizer.encode(answer, special=False)
        self.drafter = drafter
        self.proposed = self.accepted = self.passes = 0

    def run(self, most: int = 16) -> list[int]:
        """All that the row commits."""
        done: list[int] = []
        while len(done) < len(self.tokens):
            draft = self.drafter.propose({1: most}).get(1, ())
            assert len(draft) <= most
            assert self.matcher.validate_tokens(list(draft)) == len(draft), "the grammar does not allow it"
            left = self.tokens[len(done) :]
            right = next((n for n, (a, b) in enumerate(zip(draft, left, strict=False)) if a != b), len(draft))
            gained = left[: min(right, len(left)) + 1]
            assert self.matcher.consume_tokens(gained)
            self.drafter.commit(1, gained)
            done += gained
            self.passes += 1
            self.proposed += len(draft)
            self.accepted += right
        return done


def row(tokenizer: Tokenizer, compiler: GrammarCompiler, answer: str = ANSWER) -> Row:
    matcher = compiler.matcher(SCHEMA)
    drafter = GrammarDrafter(lambda request_id: matcher if request_id == 1 else None, tokenizer.vocab_size)
    drafter.join(Generate(1, (5, 6), 99, grammar=SCHEMA))
    return Row(tokenizer, matcher, drafter, answer)


def test_forced_keys_cost_few_passes_and_habits_make_fewer(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    first = row(tokenizer, compiler)
    assert first.run() == first.tokens
    values = len(tokenizer.encode("abcmailsoon", special=False))
    assert first.passes < len(first.tokens) / 2 and first.accepted > 0.8 * first.proposed
    again = row(tokenizer, compiler)
    again.drafter._habits = first.drafter._habits
    again.run()
    assert again.passes < first.passes and again.passes <= values + 3 * len(KEYS)
    assert again.accepted > 0.7 * again.proposed


@pytest.mark.parametrize("most", [1, 2, 4])
def test_no_draft_is_longer_than_it_may_be(tokenizer: Tokenizer, compiler: GrammarCompiler, most: int) -> None:
    short = row(tokenizer, compiler)
    assert short.run(most) == short.tokens
    assert short.accepted


def test_a_draft_never_changes_its_matcher(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    subject = row(tokenizer, compiler)
    before = subject.matcher.compute_bitmask()
    first = subject.drafter.propose({1: 16})
    assert first and subject.drafter.propose({1: 16}) == first
    assert subject.matcher.compute_bitmask() == before
    assert subject.matcher.consume_tokens(subject.tokens) and not subject.drafter.propose({1: 16})  # it has stopped


def test_random_answers_with_wrong_habits_stay_right(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """A habit that the grammar does not allow is not drafted, and one that the model left costs no token."""
    rng = random.Random(5)
    subject = row(tokenizer, compiler)
    for _ in range(40):
        colon, comma = rng.choice([":", ": "]), rng.choice([",", ", "])
        words = ["".join(rng.choices('ab ,:"', k=rng.randrange(5))) for _ in KEYS]
        pairs = (f'"{key}"{colon}{json.dumps(word)}' for key, word in zip(KEYS, words, strict=True))
        again = row(tokenizer, compiler, "{" + comma.join(pairs) + "}")
        again.drafter._habits = subject.drafter._habits
        assert again.run(rng.choice([1, 3, 16])) == again.tokens


def test_tokens_that_the_model_does_not_have_are_not_drafted(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(SCHEMA)
    forced = matcher.compute_ff_tokens()
    beyond = max(forced)
    drafter = GrammarDrafter(lambda _: matcher, beyond)
    drafter.join(Generate(1, (5,), 9, grammar=SCHEMA))
    draft = drafter.propose({1: 16}).get(1, ())
    assert draft == tuple(forced[: forced.index(beyond)])


def test_rows_without_a_grammar_cost_nothing_and_rows_that_leave_are_forgotten(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    def none(request_id: int) -> LLMatcher | None:
        assert request_id == 2, "asked for a row without a grammar"
        return None

    drafter = GrammarDrafter(none, tokenizer.vocab_size)
    drafter.join(Generate(1, (5,), 9))
    drafter.join(Generate(2, (5,), 9, grammar=SCHEMA))
    drafter.commit(1, (7,))
    drafter.commit(3, (7,))
    assert drafter.propose({1: 4, 2: 4, 3: 4}) == {} and len(drafter) == 1
    drafter.drop({1, 2, 3})
    assert len(drafter) == 0


def test_habits_are_few() -> None:
    habits = Habits()
    for token in range(3 * MAX_PLACES):
        habits.learn(token, token)
        habits.learn(b'":', token)
    assert len(habits) <= MAX_PLACES and len(habits.at(b'":')) == MAX_HABITS
    assert habits.at(b'":')[0] == 3 * MAX_PLACES - 1 and habits.at(b'":', least=2) == ()
    habits.learn(b'":', 3 * MAX_PLACES - 1)
    assert habits.at(b'":', least=2)
