"""On an accelerator a round waits for the device once, and once more where a policy decides by what was drafted."""

import dataclasses

import pytest
import torch
from accelerator import DEVICE, Accelerator
from conftest import VOCAB, draft_config, prompt_of, tiny_head, tiny_target
from test_policy_repository import policy_for
from test_policy_throughput import COPYING, FLAT
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_heterospec import decoding
from hf_heterospec.graphs.building import passes_of

ON_DEVICE = dataclasses.replace(FLAT, machine={"device": DEVICE.type})


class TracedPasses:
    """Stands in for `Graphs`: what would be compiled runs as it is."""

    is_ready, costs = True, None

    def __init__(self, target, head):
        self.passes = passes_of(target, head, head.layers_of(target))

    def run(self, name, *inputs):
        return self.passes[name](*inputs)

    def count_eager(self, seconds):
        pass


class Setup:
    """A target and head on an accelerator, and what they give on the CPU."""

    def __init__(self):
        self.target = tiny_target()
        self.head = tiny_head(self.target, initializer_range=0.5)
        self.head.policy = dataclasses.replace(policy_for(self.head, ON_DEVICE), throughput=COPYING)
        self.prompt = prompt_of().repeat(1, 3)
        self.plain = self.target.generate(self.prompt, do_sample=False, max_new_tokens=40, pad_token_id=0)
        self.accelerator = Accelerator()

    def decode(self, num_tokens, *, stopping_criteria=None, **settings):
        """Waits of one call, new tokens and statistics. Greedy text must be the CPU's."""
        ids, before = self.prompt.to(DEVICE), self.accelerator.num_waits
        output = self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=self.head,
            stopping_criteria=stopping_criteria,
            generation_config=draft_config(**{"max_new_tokens": num_tokens, "eos_token_id": VOCAB - 1} | settings),
        )
        waits = self.accelerator.num_waits - before
        if not settings.get("do_sample"):
            assert output.tolist() == self.plain[:, : output.shape[1]].tolist()
        return waits, output.shape[1] - ids.shape[1], self.head.last_statistics

    def decode_after_prompt(self, num_tokens=24, **settings):
        """The same, without what the prompt and its first token cost."""
        before, _, none = self.decode(1, **settings)
        assert none.rounds == 0
        waits, tokens, statistics = self.decode(num_tokens, **settings)
        assert statistics.rounds > 4
        return waits - before, tokens - 1, statistics


@pytest.fixture(params=["eager", "compiled"])
def setup(request, monkeypatch):
    setup = Setup()
    with setup.accelerator:
        setup.accelerator.take(setup.target)
        setup.accelerator.take(setup.head)
        graphs = TracedPasses(setup.target, setup.head) if request.param == "compiled" else None
        monkeypatch.setattr(decoding, "graphs_for", lambda *args: (graphs, request.param))
        yield setup


TREES = {
    "tree": {},
    "chain": {"draft_top_k": 1},
    "plain": {"draft_policy": "off"},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.mark.parametrize("name", TREES)
def test_a_round_waits_once(setup, name):
    waits, _, statistics = setup.decode_after_prompt(**TREES[name])
    assert waits == statistics.rounds


@pytest.mark.parametrize("policy", ["throughput", "paper"])
def test_a_policy_waits_once_more_where_it_looks_at_drafts(setup, policy):
    tree = {"draft_depth": 3, "draft_total_tokens": 40, "draft_top_k": 4}
    waits, _, statistics = setup.decode_after_prompt(draft_policy=policy, num_tokens=40, **tree)
    copied = sum(count for tier, count in statistics.tiers.items() if tier.startswith("copy"))
    assert copied > 0 or policy == "paper"
    assert statistics.rounds < waits <= 2 * statistics.rounds - copied


def test_sampling_waits_for_every_token_besides(setup):
    torch.manual_seed(0)
    waits, tokens, statistics = setup.decode_after_prompt(do_sample=True, eos_token_id=None)
    assert waits == statistics.rounds + tokens


class Recording(StoppingCriteria):
    devices = set()

    def __call__(self, input_ids, scores, **kwargs):
        self.devices.add(input_ids.device.type)
        return torch.zeros(1, dtype=torch.bool, device=input_ids.device)


def test_criteria_of_the_user_see_the_text_where_the_model_is(setup):
    waits, tokens, statistics = setup.decode_after_prompt(stopping_criteria=StoppingCriteriaList([Recording()]))
    assert waits == statistics.rounds + tokens
    assert Recording.devices == {DEVICE.type}
