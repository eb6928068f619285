"""Traces say what any tree would have accepted, and simulation says what a run would have done."""

import argparse
import json

import numpy as np
import pytest
import torch
from conftest import draft_config, prompt_of, tiny_head, tiny_target
from test_policy_throughput import Costs

from hf_heterospec.policy import cli
from hf_heterospec.policy.fitting import compare, fit_policy, reached_full_depth
from hf_heterospec.policy.repository import HeadReference, StratificationPolicy
from hf_heterospec.policy.rounds import FixedRounds
from hf_heterospec.policy.simulation import Simulator
from hf_heterospec.repeats import Repeats, copy
from hf_heterospec.traces import ARRAYS, TracedAnswer, Traces, collect

COSTS = Costs(((1, 20.0), (64, 60.0)), draft_first=1.0, draft_level=1.0)
LEVELS, WIDTH, NEW_TOKENS = 4, 4, 60


@pytest.fixture(scope="module")
def models():
    target = tiny_target()
    return target, tiny_head(target, initializer_range=0.5)


@pytest.fixture(scope="module")
def answers(models):
    target, _ = models
    texts = []
    for seed in range(6):
        ids = prompt_of(seed=seed)
        answer = target.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :]
        texts.append(TracedAnswer(ids[0].tolist(), answer.tolist(), f"set {seed % 2}"))
    return texts


@pytest.fixture(scope="module")
def traces(models, answers):
    return collect(*models, answers, num_levels=LEVELS, top_k=WIDTH, progress=False)


@pytest.mark.parametrize(("levels", "nodes"), [(1, 3), (2, 8), (4, 12), (4, 40)])
def test_simulation_is_what_a_real_run_does(models, answers, traces, levels, nodes):
    target, head = models
    simulator = Simulator(traces, max_nodes=40)
    rounds = accepted = 0
    for answer in answers:
        config = draft_config(
            draft_depth=levels - 1, draft_top_k=WIDTH, draft_total_tokens=nodes, max_new_tokens=NEW_TOKENS
        )
        target.generate(torch.tensor([answer.prompt_ids]), assistant_model=head, generation_config=config)
        rounds += head.last_statistics.rounds
        accepted += head.last_statistics.accepted_tokens
    replay = simulator.run(lambda: FixedRounds(levels, nodes), COSTS)
    assert accepted > 0
    assert (replay.rounds, replay.tokens - replay.rounds) == (rounds, accepted)


def test_adaptive_policies_simulate_as_they_run(models, answers, traces):
    target, head = models
    policy = fit(traces, head)
    head.policy = policy
    for name, new_policy in (
        ("paper", policy.strata.rounds),
        ("throughput", lambda: policy.throughput.rounds(COSTS, max_levels=2, max_nodes=20)),
    ):
        replay = Simulator(traces, max_nodes=30).run(new_policy, COSTS)
        rounds = 0
        for answer in answers:
            config = draft_config(
                draft_policy=name, draft_depth=1, draft_top_k=WIDTH, draft_total_tokens=20, max_new_tokens=NEW_TOKENS
            )
            target.generate(torch.tensor([answer.prompt_ids]), assistant_model=head, generation_config=config)
            rounds += head.last_statistics.rounds
        assert replay.rounds == pytest.approx(rounds, rel=0.03)
    assert any(tier.startswith("copy") for tier in replay.tiers)
    head.policy = None


def test_traces_know_what_copies_would_have_right(models, answers):
    answers = [*answers[:2], TracedAnswer([1, 2, 3, 4, 5, 2], [3, 4, 5] + [2, 3, 4, 5] * 6 + [6, 7])]
    traces = collect(*models, answers, num_levels=1, top_k=WIDTH, progress=False)
    starts = np.flatnonzero(np.diff(traces.answer, prepend=-1))
    for answer, start in zip(answers, starts, strict=True):
        text, repeats = [*answer.prompt_ids, *answer.answer_ids], Repeats()
        for place in range(start, start + len(answer.answer_ids) - 1):
            known = text[: traces.position[place] + 1]
            repeat, right = repeats.find(known), int(traces.copied[place])
            assert repeat.length == traces.repeated[place]
            if repeat.length:
                follows = text[len(known) :]
                assert copy(known, repeat, right) == follows[:right]
                assert right in (15, len(follows)) or copy(known, repeat, right + 1)[-1] != follows[right]
    assert traces.copied.max() == 15
    assert not traces.copied[traces.repeated == 0].any()


def test_traces_survive_a_file(traces, tmp_path):
    path = tmp_path / "traces.safetensors"
    traces.save(path)
    loaded = Traces.load(path)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(traces, name))
    assert loaded.sources == traces.sources
    twice = Traces.load(path, path)
    assert (len(twice), len(twice.sources)) == (2 * len(traces), 2 * len(traces.sources))
    assert twice.answer.max() == len(twice.sources) - 1


def test_files_that_are_no_traces_are_refused(tmp_path):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="trace file"):
        Traces.load(path)


def test_replaying_needs_every_position(models, answers):
    sparse = collect(*models, answers[:1], num_levels=2, top_k=WIDTH, every=3, progress=False)
    with pytest.raises(ValueError, match="every=1"):
        Simulator(sparse)


def fit(traces, head):
    return fit_policy(traces, {"eager": COSTS}, head=HeadReference(head.fingerprint()), depth=1, num_nodes=20)


def test_refitting_gives_the_same_policy(models, traces):
    assert fit(traces, models[1]) == fit(traces, models[1])


def test_no_policy_beats_the_oracle_and_full_depth_means_the_last_level(models, traces):
    simulator = Simulator(traces, max_nodes=20)
    arms = compare(simulator, fit(traces, models[1]))
    assert max(arms.values(), key=lambda arm: arm.speedup) is arms["oracle"]
    reached = reached_full_depth(simulator.ranks, depth=1, num_nodes=20)
    expected = [simulator.accepted(place, num_levels=2, num_nodes=20) == 2 for place in range(len(traces))]
    assert reached.tolist() == expected


def test_command_line_from_answers_to_a_policy(models, answers, tmp_path, monkeypatch, capsys):
    target, head = models
    monkeypatch.setattr(cli, "load_models", lambda args: (target, None, head))
    file = tmp_path / "answers.jsonl"
    rows = [{"prompt_ids": a.prompt_ids, "response_ids": a.answer_ids, "source": a.source} for a in answers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"costs": {"eager": COSTS.to_dict()}}))
    parser = argparse.ArgumentParser()
    cli.add_parsers(parser.add_subparsers())

    def run(*words):
        args = parser.parse_args([str(word) for word in words])
        assert args.run(args) == 0

    common = ("--levels", LEVELS, "--top-k", WIDTH)
    run("trace", "--answers", file, "--out", tmp_path / "t.safetensors", *common)
    fit_words = ("fit-policy", "--depth", 1, "--total-tokens", 20, "--costs", costs, "--out", tmp_path / "repo")
    run(*fit_words, "--traces", tmp_path / "t.safetensors", "--head-repo", "somebody/head@main")
    policy = StratificationPolicy.from_pretrained(tmp_path / "repo")
    assert policy.head == HeadReference(head.fingerprint(), "somebody/head", "main")
    run(*fit_words, "--answers", file, *common)
    again = StratificationPolicy.from_pretrained(tmp_path / "repo")
    assert again.strata == policy.strata
    assert again.throughput == policy.throughput
    assert "oracle" in capsys.readouterr().out


def test_report_is_a_page_with_pictures(models, traces, tmp_path):
    pytest.importorskip("matplotlib")
    from hf_heterospec.policy.report import write_report

    policy, simulator = fit(traces, models[1]), Simulator(traces, max_nodes=20)
    page = write_report(tmp_path, policy, simulator, simulator, compare(simulator, policy)).read_text()
    pictures = {path.name for path in tmp_path.glob("*.png")}
    names = ("tcr", "acceptance", "entropy", "strata", "calibration", "copies", "costs")
    assert pictures == {f"{name}.png" for name in names}
    assert all(f'src="{name}"' in page for name in pictures)
    assert "oracle" in page
