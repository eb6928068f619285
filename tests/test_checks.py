"""The checker that tells rounding from a wrong token."""

from __future__ import annotations

import pytest
import torch
from conftest import prompt_of, tiny_target

from hf_heterospec.exactness import ROUNDINGS_ALLOWED, first_difference, logit_gaps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_text_has_no_gaps_and_a_wrong_token_shows(dtype):
    target = tiny_target().to(dtype)
    ids = target.generate(prompt_of(), do_sample=False, max_new_tokens=20)
    gaps = logit_gaps(target, ids, prompt_length=7)
    assert gaps.logits.shape == (20,)
    assert gaps.roundings.max() <= ROUNDINGS_ALLOWED
    worst = target(ids[:, :12]).logits[0, -1].argmin()
    wrong = ids.clone()
    wrong[0, 12] = worst
    assert logit_gaps(target, wrong, prompt_length=7).roundings[5] > ROUNDINGS_ALLOWED
    difference = first_difference(target, wrong, ids, prompt_length=7)
    assert (difference.position, difference.token_id, difference.other_id) == (5, int(worst), int(ids[0, 12]))
    assert difference.gap > 0.1


def test_equal_outputs_do_not_differ():
    target = tiny_target()
    ids = prompt_of(9)
    assert first_difference(target, ids, ids, prompt_length=7) is None


def test_roundings_are_those_of_the_logits_size():
    """0.25 is two roundings of a bf16 logit between 16 and 32."""
    target = tiny_target().to(torch.bfloat16)
    ids = prompt_of(9)
    logits = torch.zeros(1, 8, 16, dtype=torch.bfloat16)
    logits[0, :, 3] = 20.0
    logits[0, 6, ids[0, 7]] = 19.75
    target.forward = lambda *args, **kwargs: type("Output", (), {"logits": logits})()
    gaps = logit_gaps(target, ids, prompt_length=7)
    assert float(gaps.logits[0]) == 0.25
    assert float(gaps.roundings[0]) == 2.0
