"""From tokens to segments, which tokens may come next, texts that look wrong, and the times of words."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.backend.transcription.whisper.alignment import aligned_words, alignment, split_words, warp
from millstream.backend.transcription.whisper.arithmetic import Arithmetic
from millstream.backend.transcription.whisper.sampling import Draw, Sampler
from millstream.backend.transcription.whisper.text import Attempt, Stretch, best_attempt, stretches
from millstream.backend.transcription.whisper.tokens import Allowed, SpecialTokens, allowed_next

SPECIAL = SpecialTokens(
    end=100, start=101, translate=103, transcribe=104, previous=105, no_speech=106, no_timestamps=107, languages={}
)
ZERO = SPECIAL.first_time
TIMES = 50


def at(seconds: float) -> int:
    return ZERO + round(seconds / 0.02)


def found(*tokens: int, seconds: float = 10.0) -> tuple[list[Stretch], float | None]:
    return stretches(tokens, ZERO, SPECIAL.end, seconds)


def test_pairs_of_times_make_segments() -> None:
    assert found(at(0), 1, 2, at(0.5), at(0.5), 3, at(1)) == (
        [Stretch(0.0, 0.5, (1, 2)), Stretch(0.5, 1.0, (3,))],
        None,
    )


def test_a_stretch_that_was_begun_and_not_ended_is_heard_again() -> None:
    assert found(at(0), 1, at(0.5), at(0.5), 3, 4) == ([Stretch(0.0, 0.5, (1,))], 0.5)
    assert found(at(0), 1, at(0.5), at(0.5)) == ([Stretch(0.0, 0.5, (1,))], 0.5)
    assert found(at(0), 1, at(0.5), at(0.5), 3, seconds=0.4) == ([Stretch(0.0, 0.4, (1,))], None)


def test_text_without_an_end_lasts_to_the_end() -> None:
    assert found(at(0.2), 1, 2) == ([Stretch(0.2, 10.0, (1, 2))], None)
    assert found(at(0.2), 1, 2, at(1.0)) == ([Stretch(0.2, 1.0, (1, 2))], None)
    assert found() == ([], None)
    assert found(at(0), at(0)) == ([], None)


@given(st.lists(st.integers(0, ZERO + TIMES), max_size=30), st.floats(0.02, 1.0))
def test_any_tokens_give_segments_within_the_window(tokens: list[int], seconds: float) -> None:
    segments, reached = stretches(tokens, ZERO, SPECIAL.end, seconds)
    text = [token for token in tokens if token < SPECIAL.end]
    kept = [token for segment in segments for token in segment.tokens]
    assert kept == text[: len(kept)] and (reached is not None or len(kept) <= len(text))
    for segment in segments:
        assert segment.tokens and segment.start >= 0 and segment.end <= round(seconds, 2)
    assert reached is None or 0 < reached < seconds


def test_which_tokens_may_come_next() -> None:
    def then(*tokens: int) -> Allowed:
        return allowed_next(tokens, SPECIAL, TIMES)

    assert then() == Allowed(False, False, (0, 50), True)
    assert allowed_next((), SPECIAL, 1500).times == (0, 50)
    assert then(at(0.1)) == Allowed(True, True, (0, -1), False)
    assert then(at(0.1), 1) == Allowed(True, True, (6, TIMES), False)
    assert then(at(0.1), 1, at(0.2)) == Allowed(False, True, (10, TIMES), False)
    assert then(at(0.1), 1, at(0.2), at(0.2)) == Allowed(True, True, (0, -1), False)
    assert then(at(0.1), 1, at(0.2), at(0.2), 5) == Allowed(True, True, (11, TIMES), False)


VOCAB = ZERO + TIMES + 1


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(VOCAB, SPECIAL, {5, *range(SPECIAL.end + 1, ZERO)}, {7, SPECIAL.end}, Arithmetic())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen(sampler: Sampler, temperature: float) -> None:
    """Rows of every state, on many random logits."""
    states: list[list[int]] = [[], [at(0.1)], [at(0.1), 1], [at(0.1), 1, at(0.2)]]
    allowed = [allowed_next(tokens, SPECIAL, TIMES) for tokens in states]
    for seed in range(20):
        logits = 3 * mx.random.normal((len(states), VOCAB), key=mx.random.key(seed))
        draws = [Draw(temperature, seed, row) for row in range(len(states))]
        tokens, logprobs = (np.asarray(each) for each in sampler(logits, allowed, draws))
        assert (logprobs <= 1e-5).all() and np.isfinite(logprobs).all()
        for row, (token, may) in enumerate(zip(tokens.tolist(), allowed, strict=True)):
            alone, _ = sampler(logits[row : row + 1], [may], [draws[row]])
            assert alone.tolist() == [token]
            assert token != 5 and not SPECIAL.end < token < ZERO
            if token >= ZERO:
                assert may.times[0] <= token - ZERO <= may.times[1]
            elif token == SPECIAL.end:
                assert may.end and not may.is_first
            else:
                assert may.text and not (may.is_first and token == 7)


def test_many_likely_times_outweigh_one_likelier_word(sampler: Sampler) -> None:
    logits = np.full((1, VOCAB), -20.0, np.float32)
    logits[0, 1], logits[0, ZERO + 10 : ZERO + 20] = 1.0, 0.0
    logits[0, ZERO + 12] = 0.1
    state = allowed_next([at(0.1), 1], SPECIAL, TIMES)
    token, logprob = sampler(mx.array(logits), [state], [Draw()])
    times = np.exp(logits[0, ZERO + 6 :])
    assert token.tolist() == [ZERO + 12]
    assert logprob.item() == pytest.approx(np.log(np.exp(0.1) / times.sum()), abs=1e-4)


def attempt(text: str, logprob: float, no_speech: float = 0.0, temperature: float = 0.0) -> Attempt:
    return Attempt((1,), text, logprob, temperature, no_speech)


def test_texts_that_look_wrong() -> None:
    fine = attempt("the mill stands by the stream", -0.3)
    loop = attempt("thank you " * 30, -0.1)
    guess = attempt("the mail stands", -1.4, temperature=0.2)
    silence = attempt("you", -1.2, no_speech=0.8)
    assert [each.looks_wrong for each in (fine, loop, guess, silence)] == [False, True, True, False]
    assert silence.is_silence and not fine.is_silence
    assert best_attempt([loop, fine]) is fine
    assert best_attempt([loop, guess]) is guess
    assert best_attempt([guess, attempt("the male", -2.0), loop]) is guess
    assert best_attempt([attempt("a " * 200, -0.1), attempt("ab cd " * 30, -0.2)]).text.startswith("ab")


class Letters:
    """One token per byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def token(self, name: str) -> int | None:
        return None


def words_of(text: str, language: str = "en") -> list[tuple[str, int]]:
    return split_words(list(text.encode()), Letters(), language)


def test_words_are_split_at_spaces_and_characters_stay_whole() -> None:
    assert words_of(" Käse, no") == [(" Käse", 6), (",", 1), (" no", 3)]
    assert words_of("水車", "ja") == [("水", 3), ("車", 3)]
    assert words_of("") == []


def test_punctuation_takes_no_time() -> None:
    begins = np.array([0.0, 1.0, 1.5, 2.0, 3.0], np.float32)
    words = aligned_words([(" so", 1), (",", 1), (" “", 1), ("my", 1)], begins, [0.0] * 4)
    assert [(word.text, word.tokens, word.start, word.end) for word in words] == [
        (" so,", 2, 0.0, 1.0),
        (" “my", 2, 2.0, 3.0),
    ]


def slow_warp(costs: np.ndarray) -> list[int]:
    """The same path, cell by cell."""
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            total[i, j] = costs[i - 1, j - 1] + min(total[i - 1, j - 1], total[i - 1, j], total[i, j - 1])
    return [float(total[rows, columns])]  # type: ignore[list-item]


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 1000))
def test_the_path_is_the_cheapest_one(rows: int, columns: int, seed: int) -> None:
    costs = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    begins = warp(costs)
    assert begins[0] == 0 and (np.diff(begins) >= 0).all() and begins[-1] < columns
    # A row covers the positions from its begin to the next one's, which may be shared.
    best = np.inf
    shares = [(0, 1)] * (rows - 1)
    for choice in range(2 ** len(shares)) if rows <= 8 else ():
        cost = 0.0
        for row in range(rows):
            last = columns - 1 if row == rows - 1 else begins[row + 1] - (choice >> row & 1)
            if last < begins[row]:
                cost = np.inf
                break
            cost += float(costs[row, begins[row] : last + 1].sum())
        best = min(best, cost)
    if rows <= 8:
        assert best == pytest.approx(slow_warp(costs)[0], abs=1e-4)


def test_a_diagonal_is_followed() -> None:
    weights = np.full((5, 50), -5.0, np.float32)
    for token in range(5):
        weights[token, 10 * token : 10 * token + 10] = 5.0
    assert warp(-weights).tolist() == [0, 10, 20, 30, 40]
    matrix = np.asarray(alignment([mx.array(weights)[None]], 50))
    assert warp(-matrix).tolist() == pytest.approx([0, 10, 20, 30, 40], abs=1)


def test_weights_are_smoothed_by_their_median() -> None:
    from millstream.backend.transcription.whisper.alignment import _median

    values = np.random.default_rng(0).standard_normal((2, 3, 40)).astype(np.float32)
    padded = np.pad(values, ((0, 0), (0, 0), (3, 3)), mode="reflect")
    expected = np.median(np.lib.stride_tricks.sliding_window_view(padded, 7, axis=-1), axis=-1)
    np.testing.assert_allclose(np.asarray(_median(mx.array(values))), expected, atol=1e-6)
