"""The benchmark: fair, resumable, and honest when speculation does not pay."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import prompt_of

from hf_heterospec.benchmarking import runs
from hf_heterospec.benchmarking.arms import Arm
from hf_heterospec.benchmarking.peers import EconomizeChain
from hf_heterospec.benchmarking.plot import plot
from hf_heterospec.benchmarking.prompts import load_prompt_sets
from hf_heterospec.benchmarking.report import MEAN, on_hardest, over_best_tree, summarise, table, verdict
from hf_heterospec.benchmarking.runs import Record, RecordFile, run_arms
from hf_heterospec.graphs.running import why_eager
from hf_heterospec.policy.calibration import Calibration, Curve
from hf_heterospec.policy.costs import Costs
from hf_heterospec.policy.repository import HeadReference, StratificationPolicy
from hf_heterospec.policy.stratification import Strata, paper_tiers
from hf_heterospec.policy.throughput import ThroughputRule

SPLIT = {"prefill": 0.1, "head": 0.2, "target": 0.6, "other": 0.1}


def record(arm: str, prompt: int, seconds: float, *, prompt_set: str = "a", **kwargs) -> Record:
    return Record(arm, prompt_set, prompt, 0, seconds=seconds, new_tokens=10, peak_bytes=1, **kwargs)


@pytest.fixture
def prompts(monkeypatch):
    """Prompts that are their own seeds, so that no tokenizer is needed."""
    monkeypatch.setattr(runs, "encode", lambda tokenizer, prompt, device: prompt_of(5, seed=int(prompt)))
    monkeypatch.setattr(runs, "WARM_UP_TOKENS", 3)
    return {"a": ["0", "1"], "b": ["2"]}


ARMS = [
    Arm.parse(name, compile="never") for name in ("stock", "plain-compiled", "prompt-lookup", "tree-8-1-4", "chain-3")
]


def test_every_arm_runs_on_every_prompt(target, head, prompts):
    records = run_arms(target, None, head, arms=ARMS, prompt_sets=prompts, max_new_tokens=6)
    assert len({record.key for record in records}) == len(ARMS) * 3
    assert {record.new_tokens for record in records} == {6}
    tree = next(record for record in records if record.arm == "tree-8-1-4")
    assert tree.verified_tokens >= tree.rounds > 0
    assert set(tree.split) == set(SPLIT)
    assert next(record for record in records if record.arm == "stock").rounds is None


def test_the_chain_of_economize_accepts_what_ours_accepts(target, head, prompts):
    """The same head on the same target: the arm compares decoders, and leaves the target to the other arms."""
    pytest.importorskip("economize")
    arms = [Arm.parse(name, compile="never") for name in ("chain-3", "economize-3")]
    records = run_arms(target, None, head, arms=arms, prompt_sets=prompts, max_new_tokens=24)
    by_arm = [[record for record in records if record.arm == arm.name] for arm in arms]
    for ours, theirs in zip(*by_arm, strict=True):
        assert (theirs.new_tokens, theirs.prompt, theirs.prompt_set) == (24, ours.prompt, ours.prompt_set)
        assert abs(theirs.rounds - ours.rounds) <= 1
        assert theirs.verified_tokens >= theirs.rounds
    assert sum(ours.rounds for ours in by_arm[0]) < 3 * 23  # of which some were accepted
    assert why_eager(target) is None
    assert "economize-3" in table(summarise(records))
    peer = EconomizeChain(target, head)
    ids = prompt_of(5)
    plain = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    assert peer.model.decode(ids, 24).tokens.tolist() == plain[0, 5:].tolist()


def test_the_arm_of_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("hf_heterospec.benchmarking.arms.has_economize", lambda: False)
    with pytest.raises(ValueError, match="economize-3 needs the package economize"):
        Arm.parse("economize-3")


def test_an_interrupted_run_goes_on(target, head, prompts, tmp_path, monkeypatch):
    path, settings = tmp_path / "out.records.jsonl", {"arms": ["stock"]}
    done = RecordFile(path, settings)
    run_arms(target, None, head, arms=ARMS[:1], prompt_sets={"a": ["0"]}, max_new_tokens=4, done=done)
    calls = []
    call = runs._call
    monkeypatch.setattr(runs, "_call", lambda *args: calls.append(args) or call(*args))
    done = RecordFile(path, settings)
    records = run_arms(target, None, head, arms=ARMS[:1], prompt_sets={"a": ["0", "1"]}, max_new_tokens=4, done=done)
    assert len(calls) == 2  # a warm-up and the missing one
    assert len(records) == 2


def test_a_run_goes_on_where_only_the_peers_calls_are_done(target, head, prompts, tmp_path):
    pytest.importorskip("economize")
    arms = [Arm.parse(name, compile="never") for name in ("economize-3", "chain-3")]
    done = RecordFile(tmp_path / "out.records.jsonl", {})
    run_arms(target, None, head, arms=arms[:1], prompt_sets=prompts, max_new_tokens=4, done=done)
    records = run_arms(target, None, head, arms=arms, prompt_sets=prompts, max_new_tokens=4, done=done)
    assert [record.arm for record in records] == ["economize-3"] * 3 + ["chain-3"] * 3


def test_records_of_another_run_are_not_mixed_in(tmp_path):
    RecordFile(tmp_path / "r.jsonl", {"arms": ["stock"]})
    with pytest.raises(ValueError, match="other settings"):
        RecordFile(tmp_path / "r.jsonl", {"arms": ["chain-5"]})


def test_speed_ups_are_medians_of_paired_ratios():
    """Prompts differ far more than arms do, so a ratio is taken prompt by prompt."""
    records = [
        record("stock", 0, 10.0),
        record("stock", 1, 1.0),
        record("tree-8-1-4", 0, 5.0),
        record("tree-8-1-4", 1, 0.5),
    ]
    row = next(row for row in summarise(records) if row.arm == "tree-8-1-4")
    assert row.over_stock == pytest.approx(2.0)
    assert row.over_plain is None


def test_the_mean_is_over_sets():
    records = [
        record("stock", 0, 1.0),
        record("stock", 0, 2.0, prompt_set="b"),
        record("chain-3", 0, 0.5, tau=2.0, rounds=5, verified_tokens=20, split=SPLIT),
        record("chain-3", 0, 2.0, prompt_set="b", tau=1.0, rounds=10, verified_tokens=40, split=SPLIT),
    ]
    row = next(row for row in summarise(records) if (row.arm, row.prompt_set) == ("chain-3", MEAN))
    assert row.over_stock == pytest.approx(1.5)
    assert (row.tau, row.target_calls, row.verified_tokens) == (1.5, 15, 60)
    assert "chain-3" in table(summarise(records))


def test_it_says_so_when_speculation_does_not_pay():
    losing = [record("stock", 0, 2.0), record("plain-compiled", 0, 1.0), record("tree-60-5-10", 0, 1.2)]
    assert verdict(summarise(losing)).startswith("Speculation does not pay here: the best of it, tree-60-5-10")
    winning = [*losing, record("chain-5", 0, 0.5)]
    assert verdict(summarise(winning)) == "Speculation pays: chain-5 runs at 2.00x plain-compiled."


def test_the_hardest_prompts_are_those_of_the_lowest_tau():
    records = [record("plain-compiled", number, 1.0) for number in range(4)]
    records += [record("chain-3", number, [0.5, 2.0, 1.25, 0.1][number], tau=[3.0, 1.1, 1.2, 4.0][number])
                for number in range(4)]  # fmt: skip
    assert on_hardest(records, "chain-3", num_prompts=2) == pytest.approx((0.5 + 0.8) / 2)
    assert on_hardest(records, "stock") is None
    assert on_hardest(records[4:], "chain-3") is None


def test_the_best_fixed_tree_is_chosen_in_hindsight_and_compared_prompt_by_prompt():
    records = [record("tree-4-0-10", number, 1.0) for number in range(3)]
    records += [record("chain-3", number, [0.5, 4.0, 0.5][number]) for number in range(3)]
    records += [record("throughput", number, [0.25, 1.0, 0.4][number]) for number in range(3)]
    records += [record("chain-3", 0, 1.0, prompt_set="b"), record("throughput", 0, 1.0, prompt_set="b")]
    best, ratios = over_best_tree(records, summarise(records), "throughput")
    assert best == "chain-3"
    assert ratios == pytest.approx({records[0].prompt_set: 2.0, "b": 1.0, MEAN: 1.5})
    assert over_best_tree(records, summarise(records), "paper") is None
    assert over_best_tree(records[6:9], summarise(records[6:9]), "throughput") is None


@pytest.mark.parametrize(
    "name", ["tree-60-5", "chain-x", "chain", "speculative", "tree-a-b-c", "stock-eager", "paper-alpha", "plain"]
)
def test_unknown_arms_are_refused(name):
    with pytest.raises(ValueError, match="An arm must be known"):
        Arm.parse(name)


def test_ablations_of_the_paper_change_its_tiers(target, head, prompts):
    """Of a base tree of depth 5 and 60 nodes; the head's own policy is untouched after a run."""
    strata = Strata((1.0, 2.0, 3.0), paper_tiers(5, 60), depth=5, num_nodes=60, top_k=10)
    rule = ThroughputRule(Calibration(10, (Curve((-1.0, 0.0), (0.0, 1.0)),), ((),)))
    policy = StratificationPolicy(
        HeadReference(head.fingerprint()), strata, rule, {"eager": Costs(((1, 1.0), (60, 2.0)), 1.0, 1.0, 0.1)}
    )
    head.policy = policy
    trees = {name: Arm.parse(name).config(head).draft_tiers for name in ("paper", "paper-unpruned", "paper-alpha-2")}
    assert trees == {
        "paper": None,  # those of the head's policy
        "paper-unpruned": [[8, 60], [7, 60], [6, 60]],
        "paper-alpha-2": [[7, 20], [6, 37], [5, 60]],
    }
    run_arms(target, None, head, arms=[Arm.parse("paper-unpruned-eager")], prompt_sets=prompts, max_new_tokens=6)
    assert head.policy is policy
    head.policy = None


def test_the_plot_has_a_bar_for_every_arm_and_set(tmp_path):
    matplotlib = pytest.importorskip("matplotlib.axes")
    records = [record("stock", 0, 1.0), record("stock", 0, 2.0, prompt_set="b"), record("chain-3", 0, 0.5)]
    drawn = []
    bar = matplotlib.Axes.bar
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            matplotlib.Axes, "bar", lambda *args, **kw: drawn.append((kw["label"], args[2])) or bar(*args, **kw)
        )
        plot(summarise(records), tmp_path / "bench.png")
    assert drawn == [("stock", [10.0, 5.0, 7.5]), ("chain-3", [20.0])]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_prompt_sets_come_from_files_and_folders(tmp_path):
    (tmp_path / "x.jsonl").write_text(
        json.dumps({"turns": ["one", "two"]}) + "\n" + json.dumps({"prompt": "three"}) + "\n"
    )
    assert load_prompt_sets([tmp_path], num_prompts=5) == {"x": ["one", "three"]}
    assert load_prompt_sets([tmp_path / "x.jsonl"], num_prompts=1) == {"x": ["one"]}
    (tmp_path / "x.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(ValueError, match="is no prompt"):
        load_prompt_sets([tmp_path], num_prompts=5)
