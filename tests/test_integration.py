"""The seam: pipelines, upstream's own loop, and transformers without our head exactly as before."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from conftest import chat_ids, draft_config, prompt_of, tiny_head, tiny_target
from transformers import GenerationMixin, pipeline

import hf_heterospec
from hf_heterospec import HeteroSpecCandidateGenerator
from hf_heterospec.configuration import DraftSettings


def test_pipeline(smollm, recwarn):
    model, tokenizer, head = smollm
    messages = [{"role": "user", "content": "Name three colours."}]
    kwargs = {"max_new_tokens": 24, "do_sample": False}
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer)(messages, **kwargs)
    ours = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=head)(messages, **kwargs)
    assert ours == plain
    assert head.last_statistics.rounds > 0
    assert not [w for w in recwarn if "hf_heterospec" in str(w.filename)]


def test_plain_call_with_nothing_but_the_head(smollm):
    model, tokenizer, head = smollm
    input_ids = chat_ids(tokenizer, "What is the capital of France?")
    plain = model.generate(input_ids, max_new_tokens=24)
    assert model.generate(input_ids, max_new_tokens=24, assistant_model=head).tolist() == plain.tolist()


def test_other_assistants_take_upstreams_path(target):
    """An ordinary small assistant and prompt lookup give what they gave without us."""
    assistant = tiny_target(seed=3)

    def outputs():
        return [
            target.generate(prompt_of(), do_sample=False, max_new_tokens=24, **kwargs).tolist()
            for kwargs in ({}, {"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2})
        ]

    with_us = outputs()
    hf_heterospec.uninstall()
    try:
        assert not hasattr(GenerationMixin._assisted_decoding, "__heterospec_original__")
        assert outputs() == with_us
    finally:
        hf_heterospec.install()


def test_installing_twice_wraps_once():
    wrapped = GenerationMixin._assisted_decoding
    hf_heterospec.install()
    assert GenerationMixin._assisted_decoding is wrapped
    assert not hasattr(wrapped.__heterospec_original__, "__heterospec_original__")


def test_an_upstream_with_another_signature_is_refused(monkeypatch):
    hf_heterospec.uninstall()
    try:
        monkeypatch.setattr(GenerationMixin, "_assisted_decoding", lambda self, input_ids, surprise: None)
        with pytest.raises(ImportError, match="surprise"):
            hf_heterospec.install()
    finally:
        monkeypatch.undo()
        hf_heterospec.install()


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_upstreams_own_loop_takes_the_candidate_generator(architecture, monkeypatch):
    """Chains through `GenerationMixin._assisted_decoding`, unwrapped, without and with recurrent layers."""
    target = tiny_target(architecture)
    head = tiny_head(target)
    settings = DraftSettings(depth=3, top_k=1)
    drafters = []

    def ours(self, **kwargs):
        drafters.append(HeteroSpecCandidateGenerator(head, self, settings=settings))
        return drafters[-1]

    plain = target.generate(prompt_of(), do_sample=False, max_new_tokens=24)
    monkeypatch.setattr(type(target), "_get_candidate_generator", ours)
    output = target.generate(prompt_of(), do_sample=False, max_new_tokens=24, prompt_lookup_num_tokens=3)
    assert output.tolist() == plain.tolist()
    assert drafters[0].cache.length >= 24


@pytest.mark.parametrize("command", ["import hf_heterospec", "import transformers, hf_heterospec"])
def test_import_prints_and_loads_nothing(command):
    check = f"{command}; import sys; assert 'sklearn' not in sys.modules and 'hf_heterospec.demo' not in sys.modules"
    result = subprocess.run([sys.executable, "-W", "error", "-c", check], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_two_generates_with_one_head_are_independent(target, head):
    other = tiny_target(seed=5)
    first = target.generate(prompt_of(), generation_config=draft_config(), assistant_model=head)
    other.generate(prompt_of(), generation_config=draft_config(), assistant_model=head)
    again = target.generate(prompt_of(), generation_config=draft_config(), assistant_model=head)
    assert torch.equal(first, again)


def test_head_of_another_device_or_dtype_is_moved(target):
    head = tiny_head(target).double()
    target.generate(prompt_of(), generation_config=draft_config(), assistant_model=head)
    assert head.dtype == torch.float32
