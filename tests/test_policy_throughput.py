"""The throughput rule follows costs, confidence and recent acceptance."""

import dataclasses
import itertools

import pytest

from hf_heterospec.policy.calibration import Calibration, Curve
from hf_heterospec.policy.costs import Costs
from hf_heterospec.policy.rounds import OFF, DraftView, Step
from hf_heterospec.policy.throughput import MOST_TRUST, ThroughputRule

LEVELS, WIDTH = 4, 4
# Well calibrated: a node is accepted as often as its value says.
GRID = tuple(-10 + 0.05 * step for step in range(201))
CONFIDENT = Curve(GRID, tuple(2.718281828**x if x < 0 else 1.0 for x in GRID))
HALF = Curve((0.0, 1.0), (0.0, 0.8))
CALIBRATION = Calibration(
    WIDTH,
    (CONFIDENT,) * LEVELS,
    tuple((HALF,) * min(2, LEVELS - level - 1) for level in range(LEVELS)),
)
RULE = ThroughputRule(CALIBRATION)
# After 8 tokens that stand in the text already, each further one is right nine times in ten.
COPYING = ThroughputRule(
    dataclasses.replace(CALIBRATION, copies=tuple(Curve((2.0, 8.0), (0.2**n, 0.9**n)) for n in range(1, 9)))
)
FLAT = Costs(((1, 20.0), (64, 21.0)), draft_first=1.0, draft_level=0.5)
STEEP = Costs(((1, 20.0), (64, 400.0)), draft_first=1.0, draft_level=0.5)
STEEPER = Costs(((1, 20.0), (64, 600.0)), draft_first=1.0, draft_level=0.5)
SLOW_HEAD = Costs(((1, 20.0), (64, 21.0)), draft_first=1.0, draft_level=40.0)
USELESS = Costs(((1, 20.0), (64, 21.0)), draft_first=60.0, draft_level=60.0)

SURE = [-0.05, -4.0, -5.0, -6.0]
UNSURE = [-1.6, -1.7, -1.8, -1.9]


def tree(costs, values, *, rule=RULE, max_nodes=60, max_levels=LEVELS):
    """(levels, nodes, tier) of a round in which every level drafts `values`, cumulated."""
    return finish(rule.rounds(costs, max_levels=max_levels, max_nodes=max_nodes), values)


def finish(rounds, values):
    step, draft = rounds.begin(max_levels=rounds.max_levels, max_nodes=rounds.max_nodes), DraftView()
    while step.num_nodes is None:
        level = draft.num_levels + 1
        draft.values.append([level * value for value in values])
        draft.entropies.append(0.0)
        step = rounds.decide(draft)
    return step


def test_sure_drafts_go_deeper_and_wider_costs_go_shallower():
    assert tree(FLAT, SURE).num_levels == LEVELS
    assert tree(SLOW_HEAD, SURE).num_levels == 1
    assert tree(FLAT, UNSURE).num_levels < LEVELS


def test_nodes_are_pruned_where_verifying_costs():
    assert tree(FLAT, UNSURE).num_nodes > tree(STEEP, UNSURE).num_nodes
    assert tree(STEEP, SURE).num_nodes < tree(FLAT, SURE).num_nodes


def test_bounds_hold():
    step = tree(FLAT, SURE, max_nodes=3, max_levels=2)
    assert step.num_levels <= 2
    assert step.num_nodes <= 3


def test_drafting_stops_where_plain_decoding_is_faster_and_is_tried_again():
    rounds = RULE.rounds(USELESS, max_levels=LEVELS, max_nodes=60)
    tries = []
    for index in range(60):
        step = rounds.begin(max_levels=LEVELS, max_nodes=60)
        if step.num_levels:
            tries.append(index)
            rounds.decide(DraftView([UNSURE], [0.0]))
        else:
            assert step == Step(0, 1, OFF)
        rounds.end(0)
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)  # ever longer
    assert pauses[-1] > 8
    assert len(tries) > 3  # but not for ever


def test_recent_acceptance_scales_trust_within_bounds():
    rounds = RULE.rounds(FLAT, max_levels=LEVELS, max_nodes=60)
    assert rounds.trust == 1
    for _ in range(30):
        finish(rounds, SURE)
        rounds.end(0)
    distrustful = rounds.trust
    assert distrustful < 0.5
    for _ in range(200):
        finish(rounds, UNSURE)
        rounds.end(LEVELS)
    assert distrustful < rounds.trust <= MOST_TRUST
    assert RULE.rounds(FLAT, max_levels=LEVELS, max_nodes=60).trust == 1  # every call starts afresh


def test_an_accelerator_is_asked_once():
    """Reading back makes it wait."""
    rounds = RULE.rounds(dataclasses.replace(FLAT, machine={"device": "cuda"}), max_levels=LEVELS, max_nodes=60)
    rounds.begin(max_levels=LEVELS, max_nodes=60)
    step = rounds.decide(DraftView([SURE], [0.0]))
    assert step.num_levels > 1
    assert step.num_nodes is not None


def copied(rounds, repeated, *, max_nodes=60, max_copied=15):
    return rounds.begin(max_levels=LEVELS, max_nodes=max_nodes, repeated=repeated, max_copied=max_copied).num_copied


def test_long_repeats_are_copied_as_far_as_it_pays():
    def new_rounds(costs):
        return COPYING.rounds(costs, max_levels=LEVELS, max_nodes=60)

    assert copied(new_rounds(FLAT), 8) == 8  # every curve there is
    assert 0 < copied(new_rounds(STEEPER), 8) < 8
    assert copied(new_rounds(FLAT), 2) == copied(new_rounds(FLAT), 0) == 0
    assert copied(RULE.rounds(FLAT, max_levels=LEVELS, max_nodes=60), 8) == 0  # a fit without copies
    step = new_rounds(FLAT).begin(max_levels=LEVELS, max_nodes=60, repeated=8, max_copied=5)
    assert step == Step(0, 6, "copy8", 5)


def test_copies_keep_within_bounds():
    rounds = COPYING.rounds(FLAT, max_levels=LEVELS, max_nodes=5)
    assert copied(rounds, 8) == 4
    assert copied(rounds, 8, max_nodes=3) == 2
    assert copied(rounds, 8, max_nodes=1) == copied(rounds, 8, max_copied=0) == copied(rounds, 8, max_copied=-1) == 0


def test_the_head_is_asked_where_it_brings_more_than_copies():
    rounds = COPYING.rounds(FLAT, max_levels=LEVELS, max_nodes=60)
    assert copied(rounds, 8)
    for _ in range(60):
        finish(rounds, SURE)
        rounds.end(9)
    assert not copied(rounds, 8)


def test_copies_that_fail_are_trusted_less_and_do_not_discredit_the_head():
    rounds = COPYING.rounds(STEEPER, max_levels=LEVELS, max_nodes=60)
    lengths = [copied(rounds, 8)]
    while lengths[-1]:
        rounds.end(0)
        lengths.append(copied(rounds, 8))
    assert lengths == sorted(lengths, reverse=True)
    assert 1 < len(lengths) < 20
    assert rounds.trust == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": ((2, 1.0),)},
        {"target": ((1, 1.0), (1, 2.0))},
        {"target": ()},
        {"draft_first": float("nan")},
        {"draft_level": -1.0},
    ],
)
def test_impossible_costs_are_refused(wrong):
    with pytest.raises(ValueError, match=r"[Cc]osts"):
        dataclasses.replace(FLAT, **wrong)


def test_costs_are_linear_between_sizes_and_never_fall_below_one_token():
    costs = Costs(((1, 10.0), (2, 9.0), (4, 13.0)), draft_first=2.0, draft_level=1.0, fixed=0.5)
    assert [costs.target_pass(size) for size in (1, 2, 3, 4, 6)] == [10.0, 9.0, 11.0, 13.0, 17.0]
    assert costs.round(3, 4) == 0.5 + 2 + 2 * 1 + 13
    assert costs.round(0, 1) == 10.5


@pytest.mark.parametrize(
    ("x", "y"),
    [((0.0, 1.0), (1.0, 0.0)), ((1.0, 0.0), (0.0, 1.0)), ((0.0,), (1.5,)), ((), ()), ((0.0,), (float("nan"),))],
)
def test_impossible_curves_are_refused(x, y):
    with pytest.raises(ValueError, match="curve"):
        Curve(x, y)
