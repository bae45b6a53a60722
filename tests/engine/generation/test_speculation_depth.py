"""Whether rows speculate, in simulated time: it gains where it can and costs almost nothing where it cannot."""

from __future__ import annotations

import random

import pytest

from millstream.engine.generation.speculation.choice import PAYS, Odds, Outcome, best_length, tokens_of_draft
from millstream.engine.generation.speculation.cost import StepCosts
from millstream.engine.generation.speculation.depth import PLAIN as PLAIN_CHOICE
from millstream.engine.generation.speculation.depth import SpeculationDepth
from millstream.engine.generation.speculation.lengths import LENGTHS
from support.speculation_time import COPY, NO_DRAFTS, PROSE, Kind, Machine, Row

DRAFTERS = ("grammar", "prediction", "prompt-lookup")
SLOPES = [0.02, 0.15, 0.4, 1.0]
"""What every further token of a pass costs, relative to a plain step. On a CPU, a pass of L tokens may cost L steps."""
ROWS = [1, 4, 16]
Text = list[tuple[int, Kind]]


def machine(slope: float, drafters: tuple[str, ...] = DRAFTERS, *, seed: int = 0) -> Machine:
    return Machine(SpeculationDepth(drafters), lambda rows, length: 1 + slope * (length - 1), seed=seed)


def run(texts: list[Text], slope: float, *, rounds: int = 1, drafters: tuple[str, ...] = DRAFTERS) -> Machine:
    """`rounds`: as many batches of requests with these texts, one after the other."""
    subject = machine(slope, drafters)
    for number in range(rounds):
        subject.run([Row(100 * number + row, text) for row, text in enumerate(texts)])
    return subject


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize(
    "kind",
    [PROSE, NO_DRAFTS, Kind(1.0, 0.0), Kind(1.0, 0.1), Kind(0.1, 0.3)],
    ids=["prose", "none", "bad", "poor", "few"],
)
def test_drafts_that_do_not_pay_cost_almost_nothing(kind: Kind, rows: int, slope: float) -> None:
    """Also in the first, short requests after a load, when nothing is known."""
    assert run([[(100, kind)]] * rows, slope).gain > 0.975
    assert run([[(100, kind)]] * rows, slope, rounds=6 if rows < 16 else 2).gain > 0.98
    assert rows == 16 or run([[(1200, kind)]] * rows, slope).gain > 0.985


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_a_draft_model_that_does_not_pay_is_parked(rate: float, rows: int, slope: float) -> None:
    """Only passes tell what it is worth."""
    subject = run([[(300, Kind(1.0, rate, "draft-model"))]] * rows, slope, rounds=4, drafters=("draft-model",))
    assert subject.gain > 0.975
    assert slope < 0.3 or subject.lengths.count(1) > 0.7 * len(subject.lengths)


@pytest.mark.parametrize(("slope", "least"), [(0.02, 4.5), (0.15, 2.7), (0.4, 1.5)])
@pytest.mark.parametrize("rows", ROWS)
def test_good_drafts_pay(rows: int, slope: float, least: float) -> None:
    """With many rows plain steps come first."""
    assert run([[(40, PROSE), (700, COPY)]] * rows, slope).gain > least * (0.95 if rows > 8 else 1)


@pytest.mark.parametrize("lost", [0.3, 1.0])
@pytest.mark.parametrize("rows", [4, 32])
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.97])
def test_what_a_pass_loses_around_itself_counts(rate: float, rows: int, lost: float) -> None:
    """The wait for the step before, and the next step, which nothing overlaps: the pass by itself does not show them.
    Passes that by themselves gain a quarter gave two thirds of plain steps."""
    subject = Machine(
        SpeculationDepth(DRAFTERS), lambda rows, length: 1 + 0.2 * (length - 1), lost_overlap=lost, seed=rows
    )
    for number in range(2):
        subject.run([Row(100 * number + row, [(256, Kind(0.9, rate))]) for row in range(rows)])
        assert subject.gain > (1.8 if rate > 0.9 else 0.98)


@pytest.mark.parametrize("slope", [0.02, 0.15, 0.4])
def test_an_edit_after_prose_is_noticed_within_a_few_tokens(slope: float) -> None:
    subject = machine(slope)
    subject.run([Row(1, [(1200, PROSE)])])
    before = len(subject.lengths)
    subject.run([Row(2, [(30, PROSE), (700, COPY)])])
    after = subject.lengths[before:]
    assert after[:60].count(1) < 60
    assert len(after) < 350


@pytest.mark.parametrize("rows", [2, 4, 16])
@pytest.mark.parametrize("slope", SLOPES)
def test_rows_of_both_kinds_together(rows: int, slope: float) -> None:
    subject = run([[(700, PROSE if row % 2 else COPY)] for row in range(rows)], slope)
    assert subject.gain > (1.2 if slope < 0.2 else 0.985)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("slope", SLOPES)
def test_texts_that_repeat_themselves_now_and_then(rows: int, slope: float) -> None:
    """What was learned of the last tokens is wrong about the next ones, again and again."""
    assert run([[(12, COPY), (20, PROSE)] * 20] * rows, slope).gain > 0.985


def test_forced_tokens_pay_though_other_drafts_of_the_row_do_not() -> None:
    """Each drafter of a row has a rate of its own."""
    forced, free = Kind(1.0, 0.97, "grammar"), Kind(0.8, 0.1)
    subject = run([[(14, forced), (10, free)] * 15], 0.3)
    assert subject.gain > 1.35


def test_a_draft_model_is_used_from_the_first_tokens_on() -> None:
    subject = run([[(200, Kind(1.0, 0.75, "draft-model"))]], 0.1, drafters=("draft-model",))
    assert subject.gain > 1.7
    assert subject.lengths[:8].count(1) < 4


LARGE_GPU = {1: (4.85, 6.62, 0.18), 4: (5.02, 7.32, 0.3), 16: (5.88, 9.37, 0.4), 32: (6.11, 10.5, 1.0)}
"""By rows: milliseconds of a plain step, of a pass of two tokens per row, of every further token (H200, 8B)."""


@pytest.mark.parametrize("first", [0.0, 30.0], ids=["", "traced"])
@pytest.mark.parametrize(("rate", "least"), [(0.9, 0.7), (0.7, 0.8), (0.3, 0.97), (0.0, 0.97)])
@pytest.mark.parametrize("rows", LARGE_GPU)
def test_on_a_gpu_whose_second_token_costs_half_a_step_the_best_depth_is_found(
    rows: int, rate: float, least: float, first: float
) -> None:
    """In short answers, of which some ran before. `first`: what the first pass of a kind takes longer."""
    table = {number: (two / plain, more / plain) for number, (plain, two, more) in LARGE_GPU.items()}
    seen: set[tuple[int, int]] = set()

    def cost(rows: int, length: int) -> float:
        two, more = table[min(table, key=lambda number: abs(number - rows))]
        new = length > 1 and (rows.bit_length(), length) not in seen
        seen.add((rows.bit_length(), length))
        return 1.0 if length == 1 else two + more * (length - 2) + first * new

    subject = Machine(SpeculationDepth(("known",), widest=lambda rows: 256), cost, lost_overlap=0.0)
    for number in range(5):
        if number == 3:
            first = subject.seconds = subject.plain_seconds = 0.0
        subject.run([Row(100 * number + row, [(96, Kind(1.0, rate, "known"))]) for row in range(rows)])
    two, more = table[rows]
    lengths = [length for length in LENGTHS[1:] if length * rows <= 256 and (length < 17 or rows <= 4)]
    tokens = {length: 1 + tokens_of_draft(rate, length - 1) for length in lengths}
    best = max(1.0, *(tokens[length] / (two + more * (length - 2)) for length in lengths))
    assert subject.gain > least * best


def test_rows_whose_plain_steps_are_wider_than_passes_are_exact_for_do_not_speculate() -> None:
    for rows in (4, 5):
        subject = SpeculationDepth(("known",), widest=lambda rows: 64 if rows <= 4 else 0)
        for _ in range(5):
            subject.observe((), rows=rows, seconds=0.01)
        choice = subject.choose(dict.fromkeys(range(rows), ("known",)), rows)
        assert choice.guess if rows == 4 else choice == PLAIN_CHOICE


def test_a_cost_that_was_measured_on_a_busy_machine_is_measured_again() -> None:
    """The first passes took ten times as long as they should: speculation comes back."""
    depth = SpeculationDepth(DRAFTERS)
    busy = [True]
    subject = Machine(depth, lambda rows, length: 1 + (9.0 if busy[0] and length > 1 else 0.05 * (length - 1)))
    subject.run([Row(1, [(200, COPY)])])
    busy[0] = False
    subject.run([Row(2, [(1500, PROSE)])])
    before = len(subject.lengths)
    subject.run([Row(3, [(3000, COPY)])])
    assert len(subject.lengths) - before < 1700


def test_a_first_pass_that_compiles_kernels_is_forgiven() -> None:
    """It took as long as a thousand steps."""
    seen: set[int] = set()

    def cost(rows: int, length: int) -> float:
        first = length > 1 and length not in seen
        seen.add(length)
        return 1000.0 if first else 1 + 0.05 * (length - 1)

    subject = Machine(SpeculationDepth(DRAFTERS), cost)
    subject.run([Row(1, [(3500, COPY)])])
    before = len(subject.lengths)
    subject.run([Row(2, [(3000, COPY)])])
    assert len(subject.lengths) - before < 1800


def test_speculation_ends_by_itself_with_many_rows() -> None:
    """Wide passes cost more: where 2 tokens of 16 rows cost two steps, rows decode plainly."""
    subject = Machine(SpeculationDepth(DRAFTERS), lambda rows, length: 1 + (0.02 if rows < 4 else 1.1) * (length - 1))
    subject.run([Row(1, [(300, COPY)])])
    assert subject.gain > 4
    before = len(subject.lengths)
    seconds, plain_seconds = subject.seconds, subject.plain_seconds
    subject.run([Row(10 + row, [(300, COPY)]) for row in range(16)])
    assert subject.lengths[before:].count(1) > 250
    assert (subject.plain_seconds - plain_seconds) / (subject.seconds - seconds) > 0.985


def test_nothing_is_tried_before_a_plain_step_is_known() -> None:
    subject = SpeculationDepth(DRAFTERS)
    rows = {1: DRAFTERS, 2: DRAFTERS}
    assert subject.choose(rows, 2).odds is None
    subject.observe([], rows=2, tokens=1.0, seconds=0.01)
    assert subject.choose(rows, 2).odds is not None
    assert subject.choose({}, 2).odds is None and not subject.choose({}, 2).guess
    assert SpeculationDepth(()).choose({1: ()}, 1).odds is None


def test_figures_count_what_was_verified_by_drafter() -> None:
    subject = SpeculationDepth(DRAFTERS)
    subject.observe([], rows=1, tokens=1.0, seconds=0.01)
    subject.observe([Outcome(1, "grammar", 4, 3)], length=5, rows=1, tokens=4.0, seconds=0.02)
    subject.observe([], guessed=[Outcome(1, "prompt-lookup", 3, 3)], rows=1, seconds=0.01)
    figures = subject.speculated
    assert figures.passes == 1 and figures.gain > 1
    assert figures.drafters == (("grammar", 4, 3), ("prediction", 0, 0), ("prompt-lookup", 0, 0))


def test_the_best_pass_is_the_best_of_all() -> None:
    """Against every length by itself; drafts may be shorter than what was asked for."""
    draw = random.Random(1)
    for _ in range(300):
        rows = draw.choice([1, 2, 8])
        costs = tuple((length, draw.uniform(1.0, 3.0)) for length in LENGTHS[1:])
        drafts = {row: (draw.choice(DRAFTERS), draw.randint(1, 16)) for row in range(rows) if draw.random() < 0.7}
        rates = tuple((row, drafter, draw.random()) for row in range(rows) for drafter in DRAFTERS)
        rate_of = {(row, drafter): rate for row, drafter, rate in rates}
        gains = {
            length: (
                rows
                + sum(tokens_of_draft(rate_of[row, by], min(count, length - 1)) for row, (by, count) in drafts.items())
            )
            / (rows * cost)
            for length, cost in costs
        }
        best = max(gains, key=lambda length: gains[length])
        assert best_length(Odds(costs, rates), rows, drafts) == (best if gains[best] >= PAYS else 1)


def test_a_draft_of_known_rate_gives_what_theory_says() -> None:
    assert tokens_of_draft(0.5, 2) == pytest.approx(0.75)
    assert tokens_of_draft(1.0, 4) == pytest.approx(4, rel=0.01)
    assert tokens_of_draft(0.0, 4) == 0


def test_costs_are_read_off_the_line_between_what_was_seen() -> None:
    costs = StepCosts()
    assert costs.plain(1) is None and costs.longest == 1
    assert costs.relative(1, [3])[0][1] == pytest.approx(1.1), "an optimist's guess"
    for seconds in (0.01, 0.01, 0.5, 0.01):
        costs.observe(1, 1, seconds)
    assert costs.plain(1) == 0.01, "one slow step means nothing"
    costs.observe(1, 5, 0.03)
    assert costs.relative(1, [3, 5, 9]) == [(3, pytest.approx(2)), (5, pytest.approx(3)), (9, pytest.approx(3.2))]
    assert costs.relative(8, [3]) == [(3, pytest.approx(2))], "as with the nearest number of rows"
    assert costs.knows(1, 5) and not costs.knows(8, 5) and costs.longest == 5


def test_what_a_load_measured_is_known_until_passes_tell_better() -> None:
    costs = StepCosts(steps=((1, 0.01), (4, 0.02)), verifying=((1, 2, 0.03), (1, 5, 0.02), (1, 17, 0.04), (16, 2, 0.1)))
    assert costs.plain(1) == 0.01 and costs.plain(4) == 0.02 and costs.plain(16) is None
    assert costs.longest == 17 and costs.knows(1, 5) and not costs.knows(1, 9) and not costs.knows(16, 2)
    expected = [(2, pytest.approx(2)), (5, pytest.approx(2)), (9, pytest.approx(2 + 2 / 3)), (17, pytest.approx(4))]
    assert costs.relative(1, [2, 5, 9, 17]) == expected, "a shorter pass never costs more"
    assert costs.relative(4, [5]) == [(5, pytest.approx(2))], "as with the nearest number of rows"
    for _ in range(9):
        costs.observe(1, 1, 0.02)
    assert costs.relative(1, [5]) == [(5, pytest.approx(2))], "the whole machine is slower than at load"
    costs.observe(1, 5, 0.06)
    assert costs.relative(1, [5]) == [(5, pytest.approx(2.5))], "it counts as one of them"
    for _ in range(9):
        costs.observe(1, 5, 0.06)
    assert costs.relative(1, [5, 17]) == [(5, pytest.approx(3)), (17, pytest.approx(4))]


def test_with_measured_costs_a_copy_is_long_passes_from_its_first_tokens_on() -> None:
    cost = {1: 1.0, 2: 1.2, 3: 1.4, 5: 2.1, 9: 2.6, 17: 2.8}
    verifying = [(1, length, 0.01 * cost[length]) for length in (2, 5, 17)]
    first: list[int] = []
    for costs in (StepCosts(), StepCosts(steps=((1, 0.01),), verifying=verifying)):
        subject = Machine(SpeculationDepth(DRAFTERS, costs), lambda rows, length: cost[length])
        subject.run([Row(1, [(300, Kind(1.0, 1.0))])])
        first.append(subject.lengths.index(17))
    assert first[1] < 12 and first[1] <= first[0], first


WEAK = Kind(0.8, 0.15, "prompt-lookup/weak")


def test_drafts_after_short_matches_do_not_spoil_those_after_long_ones() -> None:
    """An edit: after each change the text is found again by a few tokens, mostly at a wrong place."""
    cost = {1: 1.0, 2: 1.2, 3: 1.4, 5: 2.1, 9: 2.6, 17: 2.8}
    gains = []
    for weak in (WEAK, Kind(0.8, 0.15)):
        subject = Machine(SpeculationDepth(DRAFTERS), lambda rows, length: cost[length])
        subject.run([Row(1, [(24, COPY), (8, weak)] * 15)])
        gains.append(subject.gain)
    assert gains[0] > 1.15 * gains[1], gains


def test_short_matches_have_rates_of_their_own() -> None:
    """They may pay too: in lists and tables."""
    subject = SpeculationDepth(("prompt-lookup",))
    for _ in range(20):
        guessed = [Outcome(1, "prompt-lookup", 1, 0), Outcome(1, "prompt-lookup/weak", 1, 1)]
        subject.observe([], guessed=guessed, rows=1, seconds=0.01)
    odds = subject.choose({1: ("prompt-lookup",)}, 1).odds
    assert odds is not None
    assert best_length(odds, 1, {1: ("prompt-lookup/weak", 16)}) > 1
    assert best_length(odds, 1, {1: ("prompt-lookup", 16)}) == 1


def test_rows_whose_drafts_come_to_nothing_are_hardly_asked() -> None:
    """They once had some that were right, and have none now."""
    subject = SpeculationDepth(("known",))
    rows: dict[int, tuple[str, ...]] = dict.fromkeys(range(8), ("known",))
    subject.observe([], rows=8, seconds=0.001)
    for _ in range(20):
        subject.observe([], guessed=[Outcome(row, "known", 1, 1) for row in rows], rows=8, seconds=0.001)
    asked = steps = 0.0
    for _ in range(2000):
        asking = 100e-6 if subject.choose(rows, 8).depth else 0.0
        subject.observe([], rows=8, seconds=0.001, asking=asking)
        asked, steps = asked + asking, steps + 0.001
    assert 0.0025 * steps < asked < 0.008 * steps
    subject.observe([Outcome(row, "known", 2, 2) for row in rows], length=3, rows=8, tokens=3.0, seconds=0.001)
    assert subject.choose(rows, 8).depth, "where drafts pay, they are asked for in every step"


def test_a_long_pass_is_found_where_the_second_token_costs_a_whole_step() -> None:
    """As on a GPU: a pass cannot be launched ahead, whatever its length, and further tokens cost little."""
    subject = Machine(SpeculationDepth(DRAFTERS), lambda rows, length: 1 if length == 1 else 2 + 0.05 * (length - 2))
    subject.run([Row(1, [(600, COPY)])])
    assert subject.gain > 1.7
    assert max(subject.lengths) >= 9


def test_comparing_drafts_takes_a_hundredth_of_the_time() -> None:
    subject = SpeculationDepth(("known",))
    rows: dict[int, tuple[str, ...]] = dict.fromkeys(range(8), ("known",))
    asked = 0.0
    for _ in range(2000):
        asking = 20e-6 * len(subject.choose(rows, 8).guess)
        subject.observe([], guessed=[], rows=8, seconds=0.001, asking=asking)
        asked += asking
    assert 0.002 < asked < 0.025


def test_where_no_pass_may_be_long_nothing_is_compared() -> None:
    subject = SpeculationDepth(("known",), widest=lambda rows: 64)
    rows: dict[int, tuple[str, ...]] = dict.fromkeys(range(40), ("known",))
    for _ in range(50):
        assert not subject.choose(rows, 40).guess
        subject.observe([], rows=40, seconds=0.002)
    assert subject.stands_plain
