"""The tree: who sees whom, which nodes are kept, and what ties do."""

from __future__ import annotations

import torch
from conftest import draft_config, prompt_of, tiny_head, tiny_target

from hf_heterospec.configuration import DraftSettings
from hf_heterospec.drafting import HeteroSpecCandidateGenerator
from hf_heterospec.tree import Candidates, DraftLimits, DraftTree


def level(token_ids, parents, depth, values):
    depths = torch.full((len(token_ids),), depth)
    return Candidates(torch.tensor(token_ids), torch.tensor(parents), depths, torch.tensor(values))


def test_ancestor_mask():
    """Root 9 with children 1 and 2; under 1 the nodes 3 and 4; under 4 the node 5."""
    tree = DraftTree.best_of(
        torch.tensor([9]),
        [
            level([1, 2], [-1, -1], 1, [-0.1, -0.2]),
            level([3, 4], [0, 0], 2, [-0.3, -0.4]),
            level([5], [3], 3, [-0.5]),
        ],
        num_nodes=6,
    )
    drawn = """
        9 1 2 3 4 5
        x . . . . .
        x x . . . .
        x . x . . .
        x x . x . .
        x x . . x .
        x x . . x x
    """
    header, *rows = [line.split() for line in drawn.strip().splitlines()]
    assert tree.token_ids.tolist() == [int(token) for token in header]
    assert tree.ancestors().tolist() == [[cell == "x" for cell in row] for row in rows]
    assert tree.parents.tolist() == [0, 0, 0, 1, 1, 4]
    assert (tree.num_levels, tree.width) == (3, 2)


def test_reranking_keeps_the_best_and_their_parents():
    levels = [level([1, 2], [-1, -1], 1, [-0.1, -2.0]), level([3, 4, 5, 6], [0, 0, 1, 1], 2, [-0.3, -2.5, -2.1, -9.0])]
    tree = DraftTree.best_of(torch.tensor([9]), levels, num_nodes=4)
    assert tree.token_ids.tolist() == [9, 1, 2, 3]
    assert tree.parents.tolist() == [0, 0, 0, 1]


def test_more_nodes_than_drafted_gives_all():
    """Official EAGLE: 'selected index k out of range'."""
    levels = [level([1, 2], [-1, -1], 1, [-0.1, -2.0])]
    assert DraftTree.best_of(torch.tensor([9]), levels, num_nodes=60).num_nodes == 3


def test_a_child_that_ties_with_its_parent_never_replaces_it():
    """Official EAGLE cb7e084: where log p rounds to 0, `topk` may take the child and drop its parent; the child then
    hangs under a wrong node. Here every value ties, and any cut leaves a connected tree."""
    levels = [level([1, 2], [-1, -1], 1, [0.0, 0.0]), level([3, 4, 5, 6], [0, 0, 1, 1], 2, [0.0] * 4)]
    levels.append(level([7, 8, 10, 11], [2, 2, 5, 5], 3, [0.0] * 4))
    for num_nodes in range(2, 12):
        tree = DraftTree.best_of(torch.tensor([9]), levels, num_nodes=num_nodes)
        parents = tree.parents
        assert (parents[1:] < torch.arange(1, tree.num_nodes)).all()
        assert (tree.depths[1:] == tree.depths[parents[1:]] + 1).all()


def test_trees_of_a_sharpened_head_stay_connected():
    """The same with a head so sure of itself that its probabilities are 1."""
    target = tiny_target()
    head = tiny_head(target)
    with torch.no_grad():
        head.lm_head.weight *= 1e4
    drafter = HeteroSpecCandidateGenerator(head, target, settings=DraftSettings(depth=5, top_k=8, total_tokens=30))
    with torch.no_grad():
        states = target(prompt_of(9), output_hidden_states=True).hidden_states
        features = torch.cat([states[i] for i in (1, 2, 3)], dim=-1)
        drafter.observe(features, torch.cat((prompt_of(9)[:, 1:], torch.tensor([[3]])), 1), torch.arange(9)[None])
        tree = drafter.propose(torch.tensor([3]), DraftLimits(10, 30, 8))
    assert (tree.values == 0).sum() > 3
    assert (tree.depths[1:] == tree.depths[tree.parents[1:]] + 1).all()
    assert tree.depths.max() <= 6


def test_a_chain_is_a_tree_of_width_one():
    target = tiny_target()
    head = tiny_head(target)
    config = draft_config(draft_top_k=1, draft_depth=4, return_dict_in_generate=True)
    statistics = target.generate(prompt_of(), generation_config=config, assistant_model=head).speculation
    assert statistics.verified_tokens <= 6 * statistics.rounds
    assert len(statistics.drafted_at_depth) == 5
