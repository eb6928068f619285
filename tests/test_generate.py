"""Everything `generate` promises holds with a head: stopping, processors, streaming, outputs, seeds, errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, chat_ids, draft_config, prompt_of, tiny_head, tiny_target
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation import stopping_criteria
from transformers.generation.streamers import BaseStreamer

from hf_heterospec import HeteroSpecOutput


@pytest.fixture(scope="module")
def pair():
    """A target and a head of which blocks of several tokens are accepted."""
    target = tiny_target()
    head = tiny_head(target)
    target.generate(prompt_of(), generation_config=draft_config(max_new_tokens=60), assistant_model=head)
    assert head.last_statistics.accepted_at_depth[1] > 1
    return target, head


def both(pair, *, config_kwargs=None, input_ids=None, **kwargs):
    """`generate` with the same arguments, plainly and with the head."""
    target, head = pair
    input_ids = prompt_of() if input_ids is None else input_ids
    config = draft_config(**({"max_new_tokens": 60} | (config_kwargs or {})))
    plain = target.generate(input_ids, generation_config=config, **kwargs)
    output = target.generate(input_ids, generation_config=config, assistant_model=head, **kwargs)
    return plain, output


def plain_text(pair, length=60):
    return pair[0].generate(prompt_of(), do_sample=False, max_new_tokens=length)[0, prompt_of().shape[1] :].tolist()


class Recorder(LogitsProcessor):
    """Notes every prefix it is called with, and shifts the scores by something that depends on it."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids[0].tolist())
        torch.manual_seed(int(input_ids.sum()))
        return scores + torch.rand(scores.shape[-1])


class CountedStop(StoppingCriteria):
    """Stops when it sees a token; notes how often it was asked."""

    def __init__(self, token):
        self.token, self.lengths = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return torch.tensor([bool(input_ids[0, -1] == self.token)])


class RecordingStreamer(BaseStreamer):
    def __init__(self):
        self.puts, self.ended = [], False

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        self.ended = True


# Stopping


def test_every_token_of_a_block_can_be_the_eos(pair):
    """An EOS accepted inside a block ends the text there (transformers 47912, sglang 2150)."""
    for token in sorted(set(plain_text(pair))):
        plain, output = both(pair, config_kwargs={"eos_token_id": [token, 1], "pad_token_id": 0})
        assert output.tolist() == plain.tolist()
        assert output[0, -1] in (token, 1)


@pytest.mark.parametrize("new_tokens", range(1, 14))
def test_exact_length(pair, new_tokens):
    """Asking official EAGLE for 1, 5, 10 new tokens gave 4, 8, 11; upstream drafted past the limit (28555)."""
    plain, output = both(pair, config_kwargs={"max_new_tokens": new_tokens})
    assert output.tolist() == plain.tolist()
    statistics = pair[1].last_statistics
    assert len(statistics.drafted_at_depth) <= max(new_tokens - 2, 0)  # nothing is drafted past the budget


def test_max_length_and_min_new_tokens(pair):
    eos = plain_text(pair)[3]
    for kwargs in (
        {"max_length": 20, "max_new_tokens": None},
        {"min_new_tokens": 10, "eos_token_id": eos, "pad_token_id": 0},
        {"min_length": 12, "eos_token_id": eos, "pad_token_id": 0},
    ):
        plain, output = both(pair, config_kwargs=kwargs)
        assert output.tolist() == plain.tolist()


def test_custom_criteria_are_asked_token_by_token(pair):
    """Upstream's assisted decoding asks them once a block (open in transformers 5.25)."""
    token = plain_text(pair)[20]
    plain_stop, stop = CountedStop(token), CountedStop(token)
    target, head = pair
    config = draft_config(max_new_tokens=60)
    plain = target.generate(prompt_of(), generation_config=config, stopping_criteria=StoppingCriteriaList([plain_stop]))
    output = target.generate(
        prompt_of(), generation_config=config, assistant_model=head, stopping_criteria=StoppingCriteriaList([stop])
    )
    assert output.tolist() == plain.tolist()
    assert stop.lengths == plain_stop.lengths


def test_stop_strings(smollm):
    """The text ends with the token that completes the string, inside a block or not."""
    model, tokenizer, head = smollm
    input_ids = chat_ids(tokenizer, "Count from one to ten.")
    unstopped = model.generate(input_ids, do_sample=False, max_new_tokens=30)[0, input_ids.shape[1] :]
    for start in (5, 12, 20):
        stop = tokenizer.decode(unstopped[start : start + 2])
        config = draft_config(max_new_tokens=30, stop_strings=[stop])
        plain = model.generate(input_ids, generation_config=config, tokenizer=tokenizer)
        output = model.generate(input_ids, generation_config=config, tokenizer=tokenizer, assistant_model=head)
        assert output.tolist() == plain.tolist()
        assert output.shape[1] < input_ids.shape[1] + 30


def test_max_time(pair, monkeypatch):
    target, head = pair
    clock = SimpleNamespace(now=0.0, time=lambda: clock.now)
    monkeypatch.setattr(stopping_criteria, "time", clock)

    class Slow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            clock.now += 1.0
            return scores

    output = target.generate(
        prompt_of(),
        generation_config=draft_config(max_new_tokens=200, max_time=6.5),
        assistant_model=head,
        logits_processor=LogitsProcessorList([Slow()]),
    )
    assert output.shape[1] - prompt_of().shape[1] == 7


# Processors


def test_processors_see_the_exact_prefix_once_per_token(pair):
    """Never a refused branch: a grammar that saw one would be stuck (sglang 9187, 15050; transformers 48007)."""
    plain_recorder, recorder = Recorder(), Recorder()
    target, head = pair
    config = draft_config(max_new_tokens=40)
    plain = target.generate(
        prompt_of(), generation_config=config, logits_processor=LogitsProcessorList([plain_recorder])
    )
    output = target.generate(
        prompt_of(), generation_config=config, assistant_model=head, logits_processor=LogitsProcessorList([recorder])
    )
    assert output.tolist() == plain.tolist()
    assert recorder.prefixes == plain_recorder.prefixes
    assert head.last_statistics.accepted_tokens > 0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [7, 9]]},
        {"suppress_tokens": [3, 4, 5]},
        {"sequence_bias": [[[6], 4.0]]},
        {"exponential_decay_length_penalty": (5, 1.5), "eos_token_id": 9, "pad_token_id": 0},
        {"forced_eos_token_id": 9, "eos_token_id": 9, "pad_token_id": 0},
        {"guidance_scale": None, "renormalize_logits": True},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_builtin_processors(pair, kwargs):
    plain, output = both(pair, config_kwargs=kwargs)
    assert output.tolist() == plain.tolist()


def test_prefix_allowed_tokens(pair):
    def allowed(batch_id, ids):
        return [token for token in range(VOCAB) if (token + int(ids[-1])) % 3]

    plain, output = both(pair, prefix_allowed_tokens_fn=allowed)
    assert output.tolist() == plain.tolist()


# Streaming and outputs


def test_streamers_get_every_token_once(pair):
    target, head = pair
    streamer = RecordingStreamer()
    output = target.generate(prompt_of(), generation_config=draft_config(), assistant_model=head, streamer=streamer)
    prompt, *tokens = streamer.puts
    assert prompt == prompt_of().tolist()
    assert [token for put in tokens for token in put] == output[0, prompt_of().shape[1] :].tolist()
    assert streamer.ended


def test_text_streamer(smollm):
    model, tokenizer, head = smollm
    input_ids = chat_ids(tokenizer, "Say hello.")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    output = model.generate(
        input_ids, generation_config=draft_config(max_new_tokens=20), assistant_model=head, streamer=streamer
    )
    assert "".join(streamer) == tokenizer.decode(output[0, input_ids.shape[1] :])


@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3}], ids=["raw", "processed"])
def test_scores_logits_and_hidden_states_per_token(pair, processors):
    plain, output = both(
        pair,
        config_kwargs=processors
        | {
            "return_dict_in_generate": True,
            "output_scores": True,
            "output_logits": True,
            "output_hidden_states": True,
            "max_new_tokens": 20,
        },
    )
    assert isinstance(output, HeteroSpecOutput)
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert len(output.scores) == len(output.logits) == len(output.hidden_states) == 20
    for ours, theirs in ((output.scores, plain.scores), (output.logits, plain.logits)):
        torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), atol=1e-3, rtol=1e-4)
    for ours, theirs in zip(output.hidden_states, plain.hidden_states, strict=True):
        for our_layer, their_layer in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our_layer, their_layer, atol=1e-3, rtol=1e-4)


def test_scores_do_not_keep_whole_trees_alive(pair):
    _, output = both(pair, config_kwargs={"return_dict_in_generate": True, "output_scores": True})
    assert all(score.untyped_storage().nbytes() == score.numel() * 4 for score in output.scores)


def test_nothing_past_the_stop_is_returned_scored_or_streamed(pair):
    """vLLM 47616: stray tokens and log-probabilities behind a stop."""
    eos = plain_text(pair)[25]
    streamer = RecordingStreamer()
    target, head = pair
    output = target.generate(
        prompt_of(),
        generation_config=draft_config(
            max_new_tokens=60, eos_token_id=eos, pad_token_id=0, return_dict_in_generate=True, output_scores=True
        ),
        assistant_model=head,
        streamer=streamer,
    )
    num_new = output.sequences.shape[1] - prompt_of().shape[1]
    assert output.sequences[0, -1] == eos
    assert len(output.scores) == num_new == len(streamer.puts) - 1
    assert output.cache.get_seq_length() == output.sequences.shape[1] - 1


def test_statistics_add_up(pair):
    _, output = both(pair, config_kwargs={"return_dict_in_generate": True})
    statistics = output.speculation
    assert statistics is pair[1].last_statistics
    assert statistics.rounds + statistics.accepted_tokens == 60 - 1  # one token came from the prefill
    assert statistics.tau == pytest.approx(59 / statistics.rounds)
    assert statistics.accepted_tokens == sum(statistics.accepted_at_depth)
    assert sum(statistics.tiers.values()) == statistics.rounds
    assert statistics.verified_tokens <= 40 * statistics.rounds
    assert set(statistics.seconds) == {"prefill", "head", "target", "other"}
    assert all(seconds > 0 for seconds in statistics.seconds.values())
    assert all(0 <= share <= 1 for share in statistics.acceptance_per_depth)


def test_knobs_work_per_call_and_persist_nothing(pair):
    target, head = pair
    for nodes in (5, 12, 5):
        config = draft_config(draft_total_tokens=nodes, draft_depth=2)
        target.generate(prompt_of(), generation_config=config, assistant_model=head)
        assert max(head.last_statistics.verified_tokens / head.last_statistics.rounds, nodes) == nodes
    assert head.generation_config is None


def test_knobs_as_keywords_when_the_model_carries_our_config(pair):
    target, head = pair
    original, target.generation_config = target.generation_config, draft_config(draft_depth=1)
    try:
        target.generate(prompt_of(), assistant_model=head, draft_depth=0, draft_top_k=2)
    finally:
        target.generation_config = original
    assert len(head.last_statistics.drafted_at_depth) == 1


# Seeds


@pytest.mark.parametrize(
    "kwargs", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"repetition_penalty": 1.4}]
)
def test_a_seed_gives_the_text_of_plain_sampling(pair, kwargs):
    """Not only reproducible: the same draws in the same order as without a head."""
    for seed in range(3):
        outputs = []
        for assistant in (None, pair[1], pair[1]):
            torch.manual_seed(seed)
            config = draft_config(do_sample=True, max_new_tokens=40, **kwargs)
            outputs.append(pair[0].generate(prompt_of(), generation_config=config, assistant_model=assistant).tolist())
        assert outputs[0] == outputs[1] == outputs[2]


# What cannot work says so


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
        ({"use_cache": False}, "use_cache=False"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ],
)
def test_unsupported_modes_raise_one_clear_error(kwargs, message):
    target = tiny_target(attn_implementation="eager")
    with pytest.raises(ValueError, match=f"HeteroSpecHead cannot decode with {message}"):
        target.generate(prompt_of(), assistant_model=tiny_head(target), max_new_tokens=5, **kwargs)


def test_a_target_without_a_cache_raises_one_clear_error():
    target = tiny_target("rwkv", attention_hidden_size=32)
    with pytest.raises(ValueError, match="HeteroSpecHead cannot decode with a target that keeps no `Cache`"):
        target.generate(prompt_of(), assistant_model=tiny_head(target), max_new_tokens=5)


def test_a_state_outside_the_cache_raises_one_clear_error():
    target = tiny_target("recurrent_gemma", lru_width=32)
    with pytest.raises(ValueError, match="RecurrentGemmaForCausalLM, which keeps its state outside the cache"):
        target.generate(prompt_of(), assistant_model=tiny_head(target), max_new_tokens=5)


def test_batches_raise_one_clear_error(pair):
    with pytest.raises(ValueError, match="one sequence at a time; got a batch of 2"):
        pair[0].generate(prompt_of().repeat(2, 1), assistant_model=pair[1], max_new_tokens=5)


def test_wrong_pairs_raise_one_clear_error(pair):
    """A head of another target gives garbage in other systems (EAGLE 258, vLLM 45669)."""
    target, _ = pair
    for other, message in (
        (tiny_head(tiny_target(hidden_size=64)), "hidden size 64"),
        (tiny_head(target, target_layer_ids=[2, 4, 9]), "target_layer_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            target.generate(prompt_of(), assistant_model=other, max_new_tokens=5)
    with pytest.raises(ValueError, match="different tokenizers"):
        target.generate(prompt_of(), assistant_model=tiny_head(tiny_target(vocab_size=64)), max_new_tokens=5)


@pytest.mark.parametrize(
    "kwargs", [{"draft_depth": -1}, {"draft_top_k": 0}, {"draft_policy": "fast"}, {"draft_depth": 1.5}]
)
def test_bad_settings_raise(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        draft_config(**kwargs)


def test_misspelt_settings_raise():
    with pytest.raises(TypeError, match="draft_detph"):
        draft_config(draft_detph=3)
