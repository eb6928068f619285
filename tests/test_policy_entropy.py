"""The quantifier: H(P*), carried through the beam."""

import math

import pytest
import torch
from conftest import prompt_of

from hf_heterospec import HeteroSpecCandidateGenerator
from hf_heterospec.configuration import DraftSettings
from hf_heterospec.policy.entropy import Quantifier, entropy_of_top
from hf_heterospec.policy.rounds import FixedRounds


def test_entropy_is_in_nats_over_the_renormalised_top():
    log_probs = torch.tensor([[0.4, 0.2, 0.2], [0.1, 0.1, 0.1]]).log()  # the rest of the mass is elsewhere
    half, third = 0.5 * math.log(2) + 0.5 * math.log(4), math.log(3)
    torch.testing.assert_close(entropy_of_top(log_probs), torch.tensor([half, third]))


def test_top_k_and_steps_are_switchable():
    log_probs = torch.tensor([[0.4, 0.4, 0.1]]).log()
    step = math.log(2)
    cases = {"all": (step, 1 + step), "without_root": (0.0, 1 + step), "last": (step, step)}
    for steps, (root, second) in cases.items():
        quantifier = Quantifier(top_k=2, steps=steps)
        assert quantifier.extend(torch.zeros(1), log_probs, level=1).item() == pytest.approx(root)
        assert quantifier.extend(torch.ones(1), log_probs, level=2).item() == pytest.approx(second)


def test_path_is_switchable():
    values, entropies = torch.tensor([0.75, 0.25]).log(), torch.tensor([1.0, 3.0])
    for path, expected in (("best", 1.0), ("mean", 2.0), ("expected", 1.5)):
        assert Quantifier(path=path).of_beam(values, entropies).item() == pytest.approx(expected)


@pytest.mark.parametrize("wrong", [{"path": "worst"}, {"steps": "some"}, {"top_k": 1}])
def test_unknown_readings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Quantifier(**wrong)


@torch.no_grad()
def test_entropy_carried_through_the_beam_is_that_of_the_path(target, head):
    """Walk from a beam entry back to the root, and add up the entropies of the distributions its tokens came from."""
    width = 4
    drafter = HeteroSpecCandidateGenerator(
        head, target, settings=DraftSettings(top_k=width), policy=FixedRounds(4, 60, Quantifier())
    )
    ids = prompt_of(9)
    drafter.observe(torch.randn(1, 8, 3 * target.config.hidden_size), ids[:, 1:], torch.arange(8)[None])
    levels = [level for level, _ in zip(drafter.draft(width=width), range(4), strict=False)]
    offsets = [0, width, width + width**2, width + 2 * width**2]
    values = torch.cat([level.candidates.values for level in levels])
    parents = torch.cat([level.candidates.parents for level in levels])
    for level, offset in zip(levels, offsets, strict=True):
        for place, carried in zip(level.beam.tolist(), level.beam_entropies.tolist(), strict=True):
            node, total = offset + place, 0.0
            while node >= 0:
                parent = int(parents[node])
                base = values[parent] if parent >= 0 else 0.0
                total += float(entropy_of_top(values[parents == parent] - base))
                node = parent
            assert carried == pytest.approx(total, abs=1e-4)
