"""The paper's policy: cuts, bins and tiers."""

import numpy as np
import pytest

from hf_heterospec.policy.rounds import DraftView, Step
from hf_heterospec.policy.stratification import Strata, Tier, cart_cuts, paper_tiers


def test_cart_cuts_are_the_ones_computed_by_hand():
    """Ranks are constant on [0,1], [2,3], .., [14,15]: three levels of binary splits cut between the pairs.

    The steps grow towards the middle so that every best split is unique: 7.5 first (the largest gap between halves),
    then 3.5 and 11.5, then the odd ones. A cut is the middle between its neighbours.
    """
    entropies = np.arange(16.0)
    ranks = np.repeat([0, 1, 10, 11, 100, 101, 110, 111], 2)
    assert cart_cuts(entropies, ranks) == (1.5, 3.5, 5.5, 7.5, 9.5, 11.5, 13.5)


def test_cart_cuts_are_deterministic_and_at_most_seven():
    generator = np.random.default_rng(0)
    entropies, ranks = generator.gamma(4, size=500), generator.integers(0, 60, 500)
    cuts = cart_cuts(entropies, ranks)
    assert cuts == cart_cuts(entropies, ranks)
    assert len(cuts) <= 7
    assert list(cuts) == sorted(cuts)


def test_tiers_are_the_papers():
    """Section 3.3: d=7, K=10, N=60 gives depths 11/10/9 and N = 22/39/62."""
    assert paper_tiers(7, 60) == (Tier(11, 22), Tier(10, 39), Tier(9, 62))
    assert paper_tiers(7, 60, prune=False) == (Tier(11, 60), Tier(10, 60), Tier(9, 60))
    assert paper_tiers(7, 60, extend=False) == (Tier(7, 22), Tier(7, 39), Tier(7, 62))


STRATA = Strata((1.0, 2.0, 3.0, 4.0), paper_tiers(3, 40), depth=3, num_nodes=40, top_k=8)


@pytest.mark.parametrize(
    ("entropy", "step"),
    [(0.5, (6, 14, "B0")), (1.0, (6, 14, "B0")), (1.5, (5, 25, "B1")), (2.5, (4, 40, "B2")), (9.0, (4, 40, "base"))],
)
def test_the_bin_of_the_meta_path_decides_depth_and_nodes(entropy, step):
    rounds = STRATA.rounds()
    assert rounds.begin(max_levels=20, max_nodes=60)[:2] == (4, None)
    assert rounds.decide(DraftView([[-1.0]] * 4, [0.0, 0.0, 0.0, entropy])) == Step(*step)


def test_near_the_length_limit_no_cut_applies():
    assert STRATA.rounds().begin(max_levels=2, max_nodes=60) == Step(2, 40, "base")


@pytest.mark.parametrize("cuts", [(1.0, float("nan")), (2.0, 1.0), (1.0, 1.0), (1.0, float("inf")), (1.0,)])
def test_impossible_cuts_are_refused(cuts):
    with pytest.raises(ValueError, match="cuts"):
        Strata(cuts, paper_tiers(3, 40), depth=3, num_nodes=40, top_k=8)
