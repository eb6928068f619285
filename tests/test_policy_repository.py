"""`policy.json`: what is saved is what is loaded, and nothing unsound is."""

import copy
import json
import math
import os
from types import SimpleNamespace

import pytest
import torch
from conftest import draft_config, prompt_of, tiny_head
from test_policy_throughput import FLAT, RULE
from transformers.utils import logging

from hf_heterospec import HeteroSpecHead
from hf_heterospec.policy.costs import Costs
from hf_heterospec.policy.repository import HeadReference, PolicyMismatchError, StratificationPolicy
from hf_heterospec.policy.stratification import Strata, paper_tiers

STRATA = Strata((1.0, 2.0, 3.0), paper_tiers(3, 40), depth=3, num_nodes=40, top_k=4)


def policy_for(head, costs=FLAT) -> StratificationPolicy:
    return StratificationPolicy(HeadReference(head.fingerprint()), STRATA, RULE, {"eager": costs}, {"positions": 12})


def test_a_head_carries_its_policy(head, tmp_path):
    head.policy = policy_for(head)
    head.save_pretrained(tmp_path)
    loaded = HeteroSpecHead.from_pretrained(tmp_path)
    assert loaded.policy == head.policy
    assert StratificationPolicy.from_pretrained(tmp_path) == head.policy


def test_a_policy_repository_can_point_to_another_head(head, tmp_path):
    reference = HeadReference(head.fingerprint(), repo_id="somebody/head", revision="abc123")
    StratificationPolicy(reference, STRATA, RULE, {"compiled": FLAT}).save_pretrained(tmp_path)
    assert StratificationPolicy.from_pretrained(str(tmp_path)).head == reference


def test_saved_files_are_json_and_nothing_else(head, tmp_path):
    policy_for(head).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["policy.json"]
    assert json.loads((tmp_path / "policy.json").read_text())["schema"] == 1


def test_fingerprint_does_not_depend_on_dtype(head):
    rounded = copy.deepcopy(head).to(torch.bfloat16)
    assert rounded.fingerprint() == head.fingerprint() == rounded.float().fingerprint()


def test_a_policy_for_other_weights_is_refused(head, target):
    with pytest.raises(ValueError, match="fingerprint"):
        head.policy = policy_for(tiny_head(target, seed=1))


def edited(path, value):
    """A sound policy.json with one field replaced."""

    def edit(data):
        *parents, last = path
        for name in parents:
            data = data[name]
        data[last] = value

    return edit


HOSTILE = {
    "unknown schema": edited(["schema"], 2),
    "another file": edited(["format"], "something"),
    "NaN cut": edited(["paper", "cuts"], [1.0, math.nan, 3.0]),
    "unsorted cuts": edited(["paper", "cuts"], [3.0, 2.0, 1.0]),
    "no tiers": edited(["paper", "tiers"], None),
    "negative depth": edited(["paper", "tiers"], [{"depth": -1, "num_nodes": 10}]),
    "cuts as text": edited(["paper", "cuts"], "abc"),
    "falling curve": edited(["throughput", "calibration", "acceptance"], [{"x": [0, 1], "y": [1, 0]}] * 4),
    "too few curves": edited(["throughput", "calibration", "acceptance"], []),
    "infinite costs": edited(["costs", "eager", "draft_level_ms"], math.inf),
    "no costs": edited(["costs"], {}),
    "costs of nothing": edited(["costs", "warp"], {}),
    "costs as a list": edited(["costs"], [1]),
    "unknown reading": edited(["quantifier"], {"path": "worst"}),
    "unknown field": edited(["quantifier"], {"root": True}),
    "no head": edited(["head"], {}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_give_one_clear_error(name, head, tmp_path):
    policy_for(head).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "policy.json").read_text())
    HOSTILE[name](data)
    (tmp_path / "policy.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"policy\.json"):
        StratificationPolicy.from_pretrained(tmp_path)


def test_a_head_with_a_damaged_policy_still_loads_and_warns(head, target, tmp_path, caplog):
    head.save_pretrained(tmp_path)
    (tmp_path / "policy.json").write_text("{")
    logging.enable_propagation()
    loaded = HeteroSpecHead.from_pretrained(tmp_path)
    assert loaded.policy is None
    assert "without the policy" in caplog.text
    ids = prompt_of()
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(target.generate(ids, assistant_model=loaded, generation_config=draft_config()), plain)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("paper", {"top_k": 5}),
        ("paper", {"depth": 5}),
        ("paper", {"num_nodes": 60}),
        ("throughput", {"top_k": 5}),
        ("throughput", {"device": "cuda"}),
    ],
)
def test_what_was_not_fitted_is_refused(head, name, wrong):
    call = {"depth": 3, "top_k": 4, "num_nodes": 40, "device": "cpu"}
    policy = policy_for(head, Costs(FLAT.target, 1.0, 1.0, machine={"device": "cpu"}))
    policy.rounds(name, **call)
    with pytest.raises(PolicyMismatchError):
        policy.rounds(name, **call | wrong)


@pytest.mark.parametrize("fields", [{"draft_policy": "paper"}, {"draft_policy": "throughput"}])
def test_without_a_fitting_policy_the_fixed_tree_is_drafted(fields, head, target):
    """The output cannot be wrong, only slower: a warning, not an error."""
    ids = prompt_of()
    target.generate(ids, assistant_model=head, generation_config=draft_config(**fields))
    assert set(head.last_statistics.tiers) <= {"fixed", "off"}


def test_push_to_hub_uploads_the_policy(head, monkeypatch):
    """The upload itself is transformers' `PushToHubMixin`; nothing leaves the machine here."""
    uploaded = []
    hub = "transformers.utils.hub"
    monkeypatch.setattr(
        f"{hub}.hf_api", lambda: SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name))
    )
    monkeypatch.setattr(f"{hub}.create_and_tag_model_card", lambda *args, **_: SimpleNamespace(save=lambda path: None))
    monkeypatch.setattr(
        StratificationPolicy,
        "_upload_modified_files",
        lambda self, folder, *_, **__: uploaded.extend(os.listdir(folder)),
    )
    policy_for(head).push_to_hub("somebody/policy")
    assert uploaded == ["policy.json"]
