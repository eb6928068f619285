"""Trees, accepted paths and outputs are those of the official implementation, node for node."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import DATA

import hf_heterospec.decoding
from hf_heterospec import HeteroSpecGenerationConfig, HeteroSpecHead
from hf_heterospec.target import Target

GOLDEN = json.loads((DATA / "golden_trees.json").read_text())
# Below this gap between two log-probabilities, kernels may order them either way (fp32, sums of some ten terms).
TIE = 5e-6


@pytest.fixture
def recorded_rounds(monkeypatch):
    """`[(context length, tree, accepted path)]` of what is decoded during the test, the prefill left out."""
    trees, paths = [], []
    verify, accept = Target.verify, hf_heterospec.decoding.accept

    def recording_verify(self, tree):
        trees.append((self.cached_length, tree))
        return verify(self, tree)

    def recording_accept(*args, **kwargs):
        paths.append(accept(*args, **kwargs))
        return paths[-1]

    monkeypatch.setattr(Target, "verify", recording_verify)
    monkeypatch.setattr(hf_heterospec.decoding, "accept", recording_accept)
    return lambda: [(length, tree, path) for (length, tree), path in zip(trees, paths[1:], strict=True)]


@pytest.fixture(scope="module")
def golden_head():
    """The head that the official implementation drafted with: an earlier one than the one shipped."""
    return HeteroSpecHead.from_pretrained(DATA / "golden_head")


@pytest.mark.parametrize("run", GOLDEN["runs"], ids=lambda r: f"prompt{r['prompt']}-N{r['total_token']}-d{r['depth']}")
def test_every_node_path_and_token_is_the_official_one(run, smollm, golden_head, recorded_rounds):
    model, head = smollm[0], golden_head
    input_ids = torch.tensor([GOLDEN["prompts"][run["prompt"]]["ids"]])
    # Room behind the recorded text, so that no tree is cut short by the end.
    length = len(run["output_ids"]) + run["depth"] + 2
    config = HeteroSpecGenerationConfig(
        draft_policy="fixed",
        draft_depth=run["depth"],
        draft_top_k=run["top_k"],
        draft_total_tokens=run["total_token"],
        max_new_tokens=length,
        do_sample=False,
    )
    output = model.generate(input_ids, generation_config=config, assistant_model=head)
    rounds = recorded_rounds()

    assert output[0, input_ids.shape[1] :].tolist()[: len(run["output_ids"])] == run["output_ids"]
    assert [len(path) - 1 for _, _, path in rounds][: len(run["accepts"])] == run["accepts"]
    for golden, (context, tree, path) in zip(run["rounds"], rounds, strict=False):
        assert context == golden["ctx"]
        assert path == golden["path"]
        assert tree.depths.max() <= run["depth"] + 1
        torch.testing.assert_close(tree.values, torch.tensor(golden["score"]), atol=1e-4, rtol=0)
        assert_same_nodes(tree, golden)


def assert_same_nodes(tree, golden):
    """Node for node; where the recorded margin says that a cut was a tie, both orders are right."""
    parents = [max(parent, 0) for parent in golden["parent"]]
    ours = list(zip(tree.token_ids.tolist(), tree.parents.tolist(), tree.depths.tolist(), strict=True))
    theirs = list(zip(golden["tokens"], parents, golden["depth"], strict=True))
    gaps = {name: golden["margin"][name] for name in ("rerank_cut", "beam_cut", "beam_order", "node_cut", "node_order")}
    if min(gap for gap in gaps.values() if gap is not None) > TIE:
        assert ours == theirs
    else:
        differing = [node for node, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        values = torch.tensor(golden["score"])
        for node in differing:  # swapped with a node of the same value
            assert (values - values[node]).abs().sort().values[1] <= TIE, f"node {node}: {ours[node]} {theirs[node]}"
