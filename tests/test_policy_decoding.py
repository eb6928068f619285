"""Every policy gives the target's own text, with tiers switching inside one answer."""

import dataclasses

import pytest
import torch
from conftest import draft_config, prompt_of, tiny_head, tiny_target
from test_policy_repository import policy_for
from test_policy_throughput import COPYING, STEEP, USELESS

from hf_heterospec.policy.costs import Costs
from hf_heterospec.policy.stratification import Strata, Tier

SLOPING = Costs(((1, 20.0), (64, 60.0)), draft_first=1.0, draft_level=1.0)
CALL = {"draft_depth": 3, "draft_top_k": 4, "draft_total_tokens": 40, "max_new_tokens": 64}


def with_strata(policy, cuts):
    tiers = (Tier(5, 6), Tier(4, 20), Tier(3, 41))
    return dataclasses.replace(policy, strata=Strata(cuts, tiers, depth=3, num_nodes=40, top_k=4))


@pytest.mark.parametrize("seed", range(4))
def test_paper_policy_is_exact_while_tiers_switch(seed):
    target = tiny_target(seed=seed)
    head = tiny_head(target, seed=seed)
    head.policy = with_strata(policy_for(head), (5.4, 5.45, 5.5))  # where a random head's entropies lie
    ids = prompt_of(seed=seed)
    plain = target.generate(ids, max_new_tokens=64, do_sample=False)
    ours = target.generate(ids, assistant_model=head, generation_config=draft_config(draft_policy="paper", **CALL))
    assert torch.equal(ours, plain)
    assert len(head.last_statistics.tiers) >= 2
    assert sum(head.last_statistics.tiers.values()) == head.last_statistics.rounds


def test_tiers_can_be_set_for_one_call(target, head):
    head.policy = with_strata(policy_for(head), (5.4, 5.45, 5.5))
    ids = prompt_of()
    plain = target.generate(ids, max_new_tokens=64, do_sample=False)
    config = draft_config(
        draft_policy="paper", draft_tiers=[[3, 2], [3, 2], [3, 2]], **CALL | {"draft_total_tokens": 40}
    )
    assert torch.equal(target.generate(ids, assistant_model=head, generation_config=config), plain)
    statistics = head.last_statistics
    low = sum(statistics.tiers[tier] for tier in ("B0", "B1", "B2"))
    assert low > 0
    assert statistics.verified_tokens <= 2 * low + 40 * (statistics.rounds - low)
    config = draft_config(draft_policy="paper", draft_tiers=[[3, 2]] * 4, **CALL)
    with pytest.raises(ValueError, match="at most 3"):
        target.generate(ids, assistant_model=head, generation_config=config)


@pytest.mark.parametrize("tiers", [[3, 2], [[3, 1]], [[-1, 8]], [[3, 8, 1]], [["3", 8]], [[True, 8]]])
def test_impossible_tiers_are_refused(tiers):
    with pytest.raises(ValueError, match="draft_tiers"):
        draft_config(draft_tiers=tiers)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("costs", [SLOPING, STEEP, USELESS], ids=["sloping", "steep", "useless"])
def test_throughput_policy_is_exact_while_tiers_switch(seed, costs):
    target = tiny_target(seed=seed)
    head = tiny_head(target, seed=seed, initializer_range=0.5)  # confident here and there
    head.policy = policy_for(head, costs)
    ids = prompt_of(seed=seed)
    plain = target.generate(ids, max_new_tokens=64, do_sample=False)
    ours = target.generate(ids, assistant_model=head, generation_config=draft_config(draft_policy="throughput", **CALL))
    assert torch.equal(ours, plain)
    assert len(head.last_statistics.tiers) >= 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_copies_of_the_text_are_verified_like_any_draft(seed, do_sample):
    target = tiny_target(seed=seed)
    head = tiny_head(target, seed=seed, initializer_range=0.5)
    head.policy = dataclasses.replace(policy_for(head, SLOPING), throughput=COPYING)
    ids = prompt_of(seed=seed).repeat(1, 3)  # and random targets loop
    sampling = {"do_sample": do_sample, "temperature": 0.2} if do_sample else {"do_sample": False}
    torch.manual_seed(seed)
    plain = target.generate(ids, max_new_tokens=64, pad_token_id=0, **sampling)
    for copies in (True, False):
        torch.manual_seed(seed)
        config = draft_config(draft_policy="throughput", draft_copies=copies, **CALL | sampling)
        ours = target.generate(ids, assistant_model=head, generation_config=config)
        assert torch.equal(ours, plain)
        assert any(tier.startswith("copy") for tier in head.last_statistics.tiers) == copies


def test_rounds_without_drafts_leave_the_head_where_it_would_have_been():
    """Plain rounds are caught up in one pass: the next drafts equal those of a head that saw every round."""
    target = tiny_target()
    head = tiny_head(target)
    head.policy = policy_for(head, USELESS)
    ids = prompt_of()
    accepted = []
    for policy in ("throughput", "fixed"):
        config = draft_config(draft_policy=policy, **CALL)
        accepted.append(target.generate(ids, assistant_model=head, generation_config=config))
    assert torch.equal(*accepted)


@torch.no_grad()
def test_catching_up_at_once_equals_catching_up_every_round(target, head):
    from hf_heterospec import HeteroSpecCandidateGenerator
    from hf_heterospec.configuration import DraftSettings
    from hf_heterospec.tree import DraftLimits

    features, ids = torch.randn(1, 12, 3 * target.config.hidden_size), prompt_of(13)
    trees = []
    for lazy in (True, False):
        drafter = HeteroSpecCandidateGenerator(head, target, settings=DraftSettings(depth=2, top_k=4))
        drafter.observe(features[:, :6], ids[:, 1:7], torch.arange(6)[None])
        for end in range(7, 13):
            drafter.observe_accepted(features[:, end - 1 : end], [0], ids[:, : end + 1])
            if not lazy:
                drafter.propose(ids[0, end : end + 1], DraftLimits(3, 20, 4))
        trees.append(drafter.propose(ids[0, -1:], DraftLimits(3, 20, 4)))
    assert torch.equal(trees[0].token_ids, trees[1].token_ids)
    torch.testing.assert_close(trees[0].values, trees[1].values)


def test_sampling_repeats_plain_generate_under_every_policy(target, head):
    """Acceptance draws as plain decoding does, so a seed gives the same text whatever the tree."""
    head.policy = with_strata(policy_for(head, Costs(STEEP.target, 1.0, 0.5)), (5.4, 5.45, 5.5))
    ids = prompt_of()
    texts = []
    for policy in (None, "paper", "throughput", "fixed"):
        torch.manual_seed(3)
        assistant = {} if policy is None else {"assistant_model": head}
        config = draft_config(**CALL | {"do_sample": True, "draft_policy": policy})
        texts.append(target.generate(ids, generation_config=config, **assistant))
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_smollm_is_exact_under_the_shipped_policy(smollm):
    model, tokenizer, head = smollm
    if head.policy is None:
        pytest.skip("the shipped head carries no policy")
    ids = tokenizer("def fibonacci(n):", return_tensors="pt").input_ids
    plain = model.generate(ids, max_new_tokens=40, do_sample=False)
    tree = {"draft_depth": head.policy.strata.depth, "draft_total_tokens": head.policy.strata.num_nodes}
    for policy in ("paper", "throughput"):
        config = draft_config(draft_policy=policy, draft_top_k=head.policy.strata.top_k, max_new_tokens=40, **tree)
        assert torch.equal(model.generate(ids, assistant_model=head, generation_config=config), plain)
        assert not head.last_statistics.tiers["fixed"]
