"""Compiled passes: same text, no compilation after the first, never stale, never on a model they do not describe."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from conftest import draft_config, prompt_of, tiny_head, tiny_target
from test_policy_repository import policy_for
from test_policy_throughput import USELESS
from transformers import StaticCache
from transformers.utils import logging

from hf_heterospec.benchmarking import cli as benchmarking
from hf_heterospec.cli import main
from hf_heterospec.graphs import Graphs, building, packing, running
from hf_heterospec.graphs.building import GraphSpec
from hf_heterospec.policy.costs import Costs
from hf_heterospec.policy.rounds import OFF

TREES = {
    "plain": {"draft_policy": "off"},
    "chain": {"draft_policy": "fixed", "draft_top_k": 1, "draft_depth": 2, "draft_total_tokens": 4},
    "small tree": {"draft_policy": "fixed", "draft_top_k": 4, "draft_depth": 1, "draft_total_tokens": 8},
    "large tree": {"draft_policy": "fixed"},
}

FREE = Costs(((1, 20.0), (64, 20.0)), draft_first=0.0, draft_level=0.0, machine={"name": "another"})


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A target and head whose passes are built, in a folder of their own."""
    patch = pytest.MonkeyPatch()
    patch.setattr(building, "HF_HOME", str(tmp_path_factory.mktemp("hf_home")))
    target = tiny_target()
    head = tiny_head(target)
    running.graphs_for(target, head, "always")
    yield target, head
    patch.undo()


def generate(target, head, ids, **kwargs):
    config = draft_config(**kwargs)
    mask = torch.ones_like(ids)
    return target.generate(ids, attention_mask=mask, assistant_model=head, generation_config=config)


def plain(target, ids, num_new_tokens: int = 24):
    return target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new_tokens, do_sample=False, pad_token_id=0
    )


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("length", [1, 7, 40])
def test_compiled_text_is_plain_text(compiled, tree, length):
    target, head = compiled
    ids = prompt_of(length, seed=length)
    output = generate(target, head, ids, draft_compile="always", **TREES[tree])
    assert head.last_statistics.graphs == "compiled"
    assert torch.equal(output, plain(target, ids))


@pytest.mark.parametrize("tree", TREES)
def test_a_static_cache_is_compiled_too(compiled, tree):
    """One that `generate` makes, and one of an earlier turn that leaves room for a few rows of a tree only."""
    target, head = compiled
    ids, options = prompt_of(9), TREES[tree] | {"draft_compile": "always"}
    output = generate(target, head, ids, cache_implementation="static", **options)
    assert head.last_statistics.graphs == "compiled"
    assert torch.equal(output, plain(target, ids))
    cache = StaticCache(config=target.config, max_cache_len=9 + 2 * 24 + 3)
    config = draft_config(**options)
    first = target.generate(ids, assistant_model=head, generation_config=config, cache=cache)
    second = target.generate(first, assistant_model=head, generation_config=config, cache=cache)
    assert head.last_statistics.graphs == "compiled"
    assert torch.equal(second, plain(target, ids, 48))
    assert int(cache.get_seq_length()) == second.shape[1] - 1


def test_nothing_compiles_after_the_first_time(compiled, monkeypatch):
    """Over prompts, lengths (past a growth of the cache) and trees: no build, no trace, no inductor."""
    target, head = compiled
    generate(target, head, prompt_of(), draft_compile="always")
    for module, name in ((GraphSpec, "start_build"), (torch._inductor, "standalone_compile"), (torch, "compile")):
        monkeypatch.setattr(module, name, lambda *args, **kwargs: pytest.fail("compiled again"))
    frames = torch._dynamo.utils.counters["frames"].copy()
    for seed, tree in enumerate(TREES.values()):
        output = generate(
            target, head, prompt_of(3 + 11 * seed, seed=seed), draft_compile="always", max_new_tokens=300, **tree
        )
        assert output.shape[1] == 303 + 11 * seed
    assert torch._dynamo.utils.counters["frames"] == frames


@pytest.mark.parametrize(
    "change", [lambda p: p.mul_(-0.7), lambda p: p.data.mul_(-0.7)], ids=["in place", "through data"]
)
def test_changed_weights_are_packed_again(compiled, change):
    """Packed copies once outlived an optimizer step: the text was the old model's."""
    target, head = compiled
    ids = prompt_of()
    before = generate(target, head, ids, draft_compile="always")
    saved = [parameter.detach().clone() for parameter in target.parameters()]
    try:
        with torch.no_grad():
            for parameter in target.model.layers.parameters():
                change(parameter)
        after = generate(target, head, ids, draft_compile="always")
        assert torch.equal(after, plain(target, ids))
        assert not torch.equal(after, before)
    finally:
        with torch.no_grad():
            for parameter, old in zip(target.parameters(), saved, strict=True):
                parameter.copy_(old)


def test_graphs_share_weights_with_the_model_and_each_other(compiled):
    """Unpacked weights are the model's own storage; the three passes hold one packed copy of each weight."""
    target, head = compiled
    graphs, _ = running.graphs_for(target, head, "always")
    owners = {tensor.data_ptr() for module in (target, head) for tensor in running._tensors_of(module).values()}
    packed = {}
    for name, weights in graphs.weights.items():
        manifest = json.loads((graphs.spec.folder / building.MANIFEST.format(name)).read_text())["weights"]
        layouts = [entry["layout"] for entry in manifest]
        assert set(layouts) <= {graphs.spec.layout, None}
        unpacked = [weight for weight, layout in zip(weights, layouts, strict=True) if layout is None]
        assert all(weight.data_ptr() in owners for weight in unpacked)
        packed[name] = {id(weight) for weight, layout in zip(weights, layouts, strict=True) if layout is not None}
    assert len(packed["read"] & packed["expand"]) >= 5  # attention's two, the MLP's two, and the output layer
    assert len(packed["read"]) <= 6  # these and the projection of features
    assert len(packed["target"]) <= 4 * target.config.num_hidden_layers + 1


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="blocks are oneDNN's")
@pytest.mark.parametrize("layout", packing.Layout)
def test_packed_layers_multiply(layout):
    """Layers one below the other, of sizes that fill no panel, over one row and several, and over a batch of one."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, 24, generator=generator) for size in (40, 9)]
    packed = packing.pack(weights, layout)
    for shape in ((1, 24), (7, 24), (1, 5, 24)):
        inputs = torch.randn(shape, generator=generator)
        product = packing.MULTIPLY[layout](inputs, packed, 49)
        torch.testing.assert_close(product, torch.nn.functional.linear(inputs, torch.cat(weights)))


def test_a_layout_for_other_processors_gives_the_same_text(tmp_path, monkeypatch):
    chosen = packing.layout_for(torch.device("cpu"), torch.float32)
    layout = next(layout for layout in packing.Layout if layout is not chosen)
    if layout is packing.Layout.BLOCKS and not torch.backends.mkldnn.is_available():
        pytest.skip("blocks are oneDNN's")
    monkeypatch.setattr(packing, "layout_for", lambda device, dtype: layout)
    monkeypatch.setattr(building, "HF_HOME", str(tmp_path))
    target = tiny_target()
    head = tiny_head(target)
    ids = prompt_of(9)
    assert torch.equal(generate(target, head, ids, draft_compile="always"), plain(target, ids))
    assert head.last_statistics.graphs == "compiled"
    manifest = GraphSpec.of(target, head).folder / building.MANIFEST.format("target")
    assert {entry["layout"] for entry in json.loads(manifest.read_text())["weights"]} == {layout.value, None}


def test_a_hook_on_the_model_is_not_compiled_away(compiled):
    target, head = compiled
    ids = prompt_of()
    handle = target.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)
    try:
        output = generate(target, head, ids, draft_compile="auto")
        assert head.last_statistics.graphs == "eager: a hook is installed on it"
        assert torch.equal(output, plain(target, ids))
        with pytest.raises(ValueError, match="draft_compile='always', but a hook is installed"):
            generate(target, head, ids, draft_compile="always")
    finally:
        handle.remove()


def test_never_stays_eager(compiled):
    target, head = compiled
    generate(target, head, prompt_of(), draft_compile="never")
    assert head.last_statistics.graphs == "eager: draft_compile='never'"


def test_hidden_states_are_given_eagerly(compiled):
    target, head = compiled
    output = generate(
        target, head, prompt_of(), draft_compile="auto", output_hidden_states=True, return_dict_in_generate=True
    )
    assert output.speculation.graphs == "eager: the call asks for hidden states"
    assert len(output.hidden_states) == 24


def test_the_first_answer_never_waits(target, head, tmp_path, monkeypatch):
    """`auto` starts no build for a call or two, and serves eagerly meanwhile."""
    monkeypatch.setattr(building, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(GraphSpec, "start_build", lambda spec: pytest.fail("built for one short call"))
    generate(target, head, prompt_of(), draft_compile="auto")
    assert head.last_statistics.graphs.startswith("eager: not compiled yet")


def test_auto_loads_after_the_first_call_and_then_serves(compiled, monkeypatch):
    """As a second process does: the artefacts are there. Loading them once began with the first call, and that call's
    first token took eleven times as long."""
    target, head = compiled
    running._graphs.pop(target)
    monkeypatch.setattr(running, "LOAD_AFTER_SECONDS", 0.0)
    ids = prompt_of()
    first = generate(target, head, ids, draft_compile="auto")
    assert head.last_statistics.graphs == "eager: not compiled yet"
    graphs, _ = running.graphs_for(target, head, "auto")
    graphs._loader.join()
    second = generate(target, head, ids, draft_compile="auto")
    assert head.last_statistics.graphs == "compiled"
    assert torch.equal(first, second)


@pytest.fixture
def measured(compiled):
    """The compiled pair with a policy of another machine, where drafting costs nothing, and its graphs."""
    target, head = compiled
    graphs, _ = running.graphs_for(target, head, "always")
    head.policy = policy_for(head, FREE)
    yield target, head, graphs
    head.policy = None
    (graphs.spec.folder / building.COSTS).unlink(missing_ok=True)
    running._graphs.clear()


def drafts(target, head) -> bool:
    """Whether the throughput policy drafts in most rounds."""
    generate(target, head, prompt_of(), draft_policy="throughput", draft_top_k=4, draft_compile="always")
    statistics = head.last_statistics
    return statistics.tiers[OFF] < statistics.rounds / 2


def test_measured_costs_decide_here_and_in_later_processes(measured):
    """Over those of another machine, and under those that the user gives for this one."""
    target, head, graphs = measured
    assert drafts(target, head)
    graphs.keep_costs(USELESS)
    assert not drafts(target, head)
    assert Graphs(graphs.spec).costs == USELESS
    head.policy = policy_for(head, dataclasses.replace(FREE, machine=USELESS.machine))
    assert drafts(target, head)


@pytest.mark.parametrize("text", ["{", "{}", '{"costs": {"compiled": {"target_ms": []}}}'])
def test_damaged_costs_are_said_and_not_used(measured, text, caplog):
    spec = measured[2].spec
    building.write_whole(spec.folder / building.COSTS, text)
    logging.enable_propagation()
    assert Graphs(spec).costs is None
    assert str(spec.folder) in caplog.text
    assert "heterospec compile" in caplog.text


def test_the_compile_command_measures(measured, monkeypatch, capsys):
    target, head, graphs = measured
    monkeypatch.setattr(benchmarking, "load_pair", lambda *args, **kwargs: (target, None, head))
    assert main(["compile"]) == 0
    assert str(graphs.spec.folder) in capsys.readouterr().out
    costs = Graphs(graphs.spec).costs
    assert costs.machine["draft_compile"] == "always"
    assert costs.sizes[-1] == 60


def test_damaged_artefacts_are_said_and_not_used(compiled):
    target, head = compiled
    graphs, _ = running.graphs_for(target, head, "always")
    file = graphs.spec.folder / building.ARTEFACT.format("read")
    whole = file.read_bytes()
    running._graphs.pop(target)
    try:
        file.write_bytes(whole[:100])
        with pytest.raises(ValueError, match=r"cannot be loaded .* delete"):
            running.graphs_for(target, head, "always")
    finally:
        file.write_bytes(whole)
        running._graphs.pop(target)


@pytest.mark.parametrize(
    "change",
    [{"num_threads": 99}, {"dtype": "bfloat16"}, {"layer_ids": [1, 2, 4]}, {"machine": "other"}, {"sources": "0"}],
)
def test_whatever_a_graph_depends_on_names_its_folder(target, head, change):
    spec = GraphSpec.of(target, head)
    assert dataclasses.replace(spec, **change).folder != spec.folder
    assert GraphSpec.of(tiny_target(seed=3), head).folder == spec.folder  # weights are inputs
    assert GraphSpec.of(tiny_target(rope_theta=7.0), head).folder != spec.folder


def test_the_returned_cache_goes_on_like_any_other(compiled):
    """A cache from a compiled call continues in plain `generate`, and is as long as the text."""
    target, head = compiled
    ids = prompt_of()
    first = generate(target, head, ids, draft_compile="always", return_dict_in_generate=True, max_new_tokens=10)
    assert first.cache.get_seq_length() == first.sequences.shape[1] - 1
    more = target.generate(
        first.sequences, attention_mask=torch.ones_like(first.sequences), cache=first.cache, max_new_tokens=14,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(more, plain(target, ids))


def test_a_head_in_bf16_keeps_exact_frequencies(target, head):
    """`.to(bfloat16)` once rounded the rotary frequencies: angles were off by a radian at position 1000, eagerly, and a
    graph that took them for fp32 drafted nothing right."""
    exact = head.rotary_emb.inv_freq.clone()
    head.to(torch.bfloat16)
    assert torch.equal(head.rotary_emb.inv_freq, exact)
    assert head.lm_head.weight.dtype == torch.bfloat16


def test_a_weight_that_is_not_what_the_graph_takes_is_refused(compiled):
    target, head = compiled
    running._graphs.pop(target, None)
    norm = target.model.norm
    norm.weight.data = norm.weight.data.half()
    try:
        with pytest.raises(ValueError, match=r"its weight model.model.norm.weight is .*float16"):
            running.graphs_for(target, head, "always")
    finally:
        norm.weight.data = norm.weight.data.float()
        running._graphs.pop(target, None)
