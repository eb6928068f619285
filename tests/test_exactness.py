"""fp32 greedy output equals plain `generate`, token for token, whatever the target, the cache and the tree."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import ARCHITECTURES, RECURRENT, chat_ids, draft_config, prompt_of, tiny_head, tiny_target
from transformers import DynamicCache, StaticCache

from hf_heterospec import HeteroSpecGenerationConfig


def assert_equals_plain(target, head, input_ids, config=None, **inputs):
    """Both outputs are the same, and the head's drafts were partly accepted and partly refused."""
    config = config or draft_config()
    plain = target.generate(input_ids, do_sample=False, max_new_tokens=config.max_new_tokens, **inputs)
    output = target.generate(input_ids, generation_config=config, assistant_model=head, **inputs)
    assert output.tolist() == plain.tolist()
    return head.last_statistics


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("seed", [0, 1])
def test_architectures(architecture, seed):
    target = tiny_target(architecture, seed=seed)
    statistics = assert_equals_plain(target, tiny_head(target, seed=seed), prompt_of(seed=seed))
    assert 0 < statistics.accepted_tokens < sum(statistics.drafted_at_depth)


@pytest.mark.parametrize("architecture", RECURRENT)
@pytest.mark.parametrize("tree", [{}, {"draft_top_k": 1, "draft_depth": 6, "draft_total_tokens": 8}])
def test_recurrent_layers_are_given_chains(architecture, tree):
    """Their state is rolled back to the one behind the last accepted node; there is no state of a branch."""
    target = tiny_target(architecture)
    statistics = assert_equals_plain(target, tiny_head(target), prompt_of(), draft_config(max_new_tokens=60, **tree))
    assert 0 < statistics.accepted_tokens < sum(statistics.drafted_at_depth)
    assert statistics.graphs == "eager: it has layers without full attention"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("depth", "width", "nodes"), [(0, 1, 2), (5, 1, 60), (0, 8, 9), (3, 2, 5), (4, 8, 10_000)])
def test_trees_from_chains_to_everything_drafted(attention, depth, width, nodes):
    """More nodes asked for than drafted: the tree holds what there is."""
    target = tiny_target(attn_implementation=attention)
    config = draft_config(draft_depth=depth, draft_top_k=width, draft_total_tokens=nodes, max_new_tokens=40)
    statistics = assert_equals_plain(target, tiny_head(target), prompt_of(), config)
    assert statistics.accepted_tokens > 0


@pytest.mark.parametrize("length", [1, 2, 3, 60])
def test_prompt_lengths(target, head, length):
    assert_equals_plain(target, head, prompt_of(length))


@pytest.mark.parametrize("cache_implementation", ["static", "dynamic"])
def test_caches_made_by_generate(target, head, cache_implementation):
    """A static cache holds the answer exactly; the tree's rows are added to it."""
    config = draft_config(cache_implementation=cache_implementation, max_new_tokens=40)
    assert assert_equals_plain(target, head, prompt_of(), config).accepted_tokens > 0


@pytest.mark.parametrize("spare_rows", [0, 1, 5, 100])
def test_static_cache_handed_in_is_never_overrun(target, head, spare_rows):
    input_ids, config = prompt_of(), draft_config(return_dict_in_generate=True)
    plain = target.generate(input_ids, do_sample=False, max_new_tokens=24)
    cache = StaticCache(config=target.config, max_cache_len=input_ids.shape[1] + 23 + spare_rows)
    output = target.generate(input_ids, generation_config=config, assistant_model=head, cache=cache)
    assert output.sequences.tolist() == plain.tolist()
    assert output.cache is cache
    assert int(cache.get_seq_length()) == plain.shape[1] - 1


def test_left_padding_and_its_mask(target, head):
    input_ids = torch.cat((torch.zeros(1, 4, dtype=torch.long), prompt_of()), dim=1)
    mask = (torch.arange(input_ids.shape[1]) >= 4).long()[None]
    statistics = assert_equals_plain(target, head, input_ids, attention_mask=mask)
    bare = assert_equals_plain(target, head, prompt_of())
    assert statistics.accepted_at_depth == bare.accepted_at_depth  # the head does not see the padding either


def test_embeddings_as_prompt(target, head):
    embeddings = target.get_input_embeddings()(prompt_of())
    plain = target.generate(inputs_embeds=embeddings, do_sample=False, max_new_tokens=24)
    output = target.generate(inputs_embeds=embeddings, generation_config=draft_config(), assistant_model=head)
    assert output.tolist() == plain.tolist()


def test_chunked_prefill(target, head):
    config = draft_config(prefill_chunk_size=4)
    assert_equals_plain(target, head, prompt_of(30), config)


@pytest.mark.parametrize("max_new_tokens", [4, 60])
@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_sliding_window_before_and_after_it_is_full(architecture, max_new_tokens):
    """Trees while everything is inside the window, chains once the text has passed it (transformers PR 48280)."""
    target = tiny_target(architecture, sliding_window=48)
    head = tiny_head(target)
    statistics = assert_equals_plain(target, head, prompt_of(20), draft_config(max_new_tokens=max_new_tokens))
    assert statistics.rounds > 0


def test_cache_without_window_under_a_model_with_one():
    target = tiny_target("mistral", sliding_window=12)
    head, input_ids = tiny_head(target), prompt_of(30)
    plain = target.generate(input_ids, do_sample=False, max_new_tokens=24, cache=DynamicCache())
    output = target.generate(input_ids, generation_config=draft_config(), assistant_model=head, cache=DynamicCache())
    assert output.tolist() == plain.tolist()


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_cache_of_an_earlier_turn(target, head, implementation):
    """The second turn continues the first one's cache, which holds what plain decoding would have left there."""
    first_ids, more_ids = prompt_of(6), prompt_of(5, seed=1)

    def two_turns(config, **kwargs):
        cache = (
            DynamicCache(config=target.config)
            if implementation == "dynamic"
            else StaticCache(config=target.config, max_cache_len=120)
        )
        first = target.generate(first_ids, generation_config=config, cache=cache, **kwargs)
        assert int(cache.get_seq_length()) == first.shape[1] - 1
        ids = torch.cat((first, more_ids), dim=1)
        return target.generate(ids, generation_config=config, cache=cache, **kwargs)

    plain = two_turns(draft_config())
    output = two_turns(draft_config(), assistant_model=head)
    assert output.tolist() == plain.tolist()


@pytest.mark.parametrize("architecture", RECURRENT)
def test_recurrent_state_of_an_earlier_turn(architecture):
    """It is the one plain decoding would have left, and the second turn may be decoded without the head."""
    target = tiny_target(architecture)
    head, more_ids = tiny_head(target), prompt_of(5, seed=1)
    config = draft_config(return_dict_in_generate=True)

    def two_turns(*assistants):
        first, second = assistants
        turn = target.generate(prompt_of(6), generation_config=config, assistant_model=first)
        ids = torch.cat((turn.sequences, more_ids), dim=1)
        return target.generate(ids, generation_config=config, cache=turn.cache, assistant_model=second).sequences

    plain = two_turns(None, None)
    for assistants in ((head, head), (head, None), (None, head)):
        assert two_turns(*assistants).tolist() == plain.tolist()


def test_policy_off_is_plain_decoding(target, head):
    statistics = assert_equals_plain(target, head, prompt_of(), draft_config(draft_policy="off"))
    assert statistics.tau == 1.0
    assert statistics.verified_tokens == statistics.rounds == 23


def test_nothing_stays_on_the_model(target, head):
    """Official EAGLE leaves its last tree mask on the model: a later plain forward is silently wrong."""
    before = target.generate(prompt_of(), do_sample=False, max_new_tokens=10)
    target(prompt_of(), output_hidden_states=True)  # transformers installs its capturing hooks once
    attributes = set(vars(target)), set(vars(target.model)), set(vars(target.config))
    assert_equals_plain(target, head, prompt_of())
    assert (set(vars(target)), set(vars(target.model)), set(vars(target.config))) == attributes
    assert target.generate(prompt_of(), do_sample=False, max_new_tokens=10).tolist() == before.tolist()


def test_smollm_on_the_bench_prompts(smollm, bench_prompts):
    """Three prompts of each evaluation set, compiled with the policies in turn, and the first of them eagerly too;
    `benchmarks/exactness.py` does 20, and longer answers."""
    model, tokenizer, head = smollm
    tree = {"draft_policy": "fixed", "draft_depth": 4, "draft_top_k": 10, "draft_total_tokens": 30}
    taus, served, seen = [], {}, set()
    for row, policy in zip(bench_prompts, itertools.cycle(("throughput", "paper", "fixed", "off"))):
        input_ids = chat_ids(tokenizer, row["prompt"])
        plain = model.generate(input_ids, do_sample=False, max_new_tokens=64)
        arms = [{"draft_policy": policy, "draft_compile": "always"}]
        if row["set"] not in seen:
            seen.add(row["set"])
            arms.append({"draft_compile": "never", **tree})
        for draft in arms:
            config = HeteroSpecGenerationConfig(do_sample=False, max_new_tokens=64, **draft)
            output = model.generate(input_ids, generation_config=config, assistant_model=head)
            assert output.tolist() == plain.tolist(), f"{row['set']} {row['question_id']} {draft}"
            if draft["draft_compile"] == "never":
                taus.append(head.last_statistics.tau)
            else:
                served.setdefault(policy, set()).update(head.last_statistics.tiers)
                assert head.last_statistics.graphs == "compiled"
    assert sum(taus) / len(taus) > 1.9  # the head is a real one
    assert len(served["throughput"]) > 3  # tiers switched inside answers
    assert any(tier.startswith("copy") for tier in served["throughput"])
    assert len(served["paper"]) > 1
