"""Sampling with a head draws from the target's own distribution.

The tree proposes fixed tokens, so the draft distribution q has all its mass on them, and speculative sampling reduces
to: draw from p, follow the child that carries the draw. The tests compare frequencies of whole continuations with their
exact probabilities by a chi-square test, and show that the test has the power to find a wrong rule.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from conftest import draft_config, prompt_of, tiny_head, tiny_target
from scipy.stats import chisquare
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_heterospec.acceptance import TokenChooser, accept
from hf_heterospec.sequence import Sequence
from hf_heterospec.target import TargetPass
from hf_heterospec.tree import Candidates, DraftTree

PROCESSORS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.7)],
    "top_k": [TopKLogitsWarper(4)],
    "top_p": [TopPLogitsWarper(0.8)],
    "repetition_penalty": [RepetitionPenaltyLogitsProcessor(1.8)],
    "all": [
        RepetitionPenaltyLogitsProcessor(1.3),
        TemperatureLogitsWarper(1.5),
        TopKLogitsWarper(6),
        TopPLogitsWarper(0.9),
    ],
}
TOKENS, SAMPLES = 6, 20_000


def p_value(counts: Counter, probabilities: dict, samples: int) -> float:
    """Chi-square p-value of the counts. Outcomes expected less than five times are pooled; impossible ones give 0."""
    if any(probabilities.get(outcome, 0) == 0 for outcome in counts):
        return 0.0
    observed, expected, rest = [], [], [0.0, 0.0]
    for outcome, probability in probabilities.items():
        if probability * samples >= 5:
            observed.append(counts[outcome])
            expected.append(probability * samples)
        else:
            rest[0] += counts[outcome]
            rest[1] += probability * samples
    if rest[1] >= 5:
        observed.append(rest[0])
        expected.append(rest[1])
    total = sum(expected)
    return chisquare(observed, [value * sum(observed) / total for value in expected]).pvalue


# One round: a fixed tree whose root has children 0 and 2, and under 0 a child 1.
#
#     root(5) - 0 - 1
#             \\ 2
TREE = DraftTree.best_of(
    torch.tensor([5]),
    [
        Candidates(torch.tensor([0, 2]), torch.tensor([-1, -1]), torch.tensor([1, 1]), torch.tensor([-0.5, -1.0])),
        Candidates(torch.tensor([1]), torch.tensor([0]), torch.tensor([2]), torch.tensor([-0.7])),
    ],
    num_nodes=4,
)
NODE_PREFIXES = {0: (), 1: (0,), 2: (2,), 3: (0, 1)}


def node_logits() -> torch.Tensor:
    return torch.randn(4, TOKENS, generator=torch.Generator().manual_seed(3)) * 1.5


def exact_block_probabilities(processors) -> dict:
    """Of every block one round can emit: walk p along the tree by hand."""
    logits, prompt = node_logits(), [3, 5]
    nodes_of = {prefix: node for node, prefix in NODE_PREFIXES.items()}

    def p(prefix):
        ids = torch.tensor([prompt + list(prefix)])
        scores = LogitsProcessorList(processors)(ids, logits[nodes_of[prefix]][None].clone())
        return scores.softmax(-1)[0].tolist()

    blocks = {}
    stack = [((), 1.0)]
    while stack:
        prefix, mass = stack.pop()
        for token, probability in enumerate(p(prefix)):
            block = (*prefix, token)
            if block in nodes_of:
                stack.append((block, mass * probability))
            else:
                blocks[block] = mass * probability
    return blocks


def sample_blocks(processors, rule) -> Counter:
    scores = TargetPass(node_logits(), None, None)
    config = GenerationConfig(max_length=100)
    chooser = TokenChooser(LogitsProcessorList(processors), do_sample=True)
    counts = Counter()
    for _ in range(SAMPLES):
        sequence = Sequence(
            torch.tensor([[3, 5]]), stopping_criteria=NeverStop(), streamer=None, generation_config=config
        )
        rule(TREE, scores, chooser=chooser, sequence=sequence)
        counts[tuple(sequence.ids[0, 2:].tolist())] += 1
    return counts


class NeverStop(StoppingCriteriaList):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([False])


@pytest.mark.parametrize("name", PROCESSORS)
def test_blocks_of_a_round_have_the_targets_distribution(name):
    torch.manual_seed(0)
    counts = sample_blocks(PROCESSORS[name], accept)
    assert p_value(counts, exact_block_probabilities(PROCESSORS[name]), SAMPLES) > 1e-3


def walk_siblings(tree, scores, *, chooser, sequence, strike_refused):
    """Speculative sampling as EAGLE writes it: try the children in turn, then draw the bonus from what is left of p.

    With `strike_refused=False` the refused children stay in p: the wrong residual the test must find.
    """
    children = {0: [(1, 0), (2, 2)], 1: [(3, 1)], 2: [], 3: []}
    node = 0
    while True:
        processed = chooser.processors(sequence.ids, scores.logits[node][None].clone())
        p = processed.softmax(-1)[0]
        for child, token in children[node]:  # noqa: B007
            if torch.rand(()) < p[token]:
                break
            if strike_refused:
                p[token] = 0
                p = p / p.sum()
        else:
            child, token = None, int(torch.multinomial(p, 1))
        sequence.ids = torch.cat((sequence.ids, torch.tensor([[token]])), dim=1)
        if child is None:
            return
        node = child


@pytest.mark.parametrize("strike_refused", [True, False])
def test_the_test_finds_a_wrong_residual(strike_refused):
    """The sibling-by-sibling rule passes too, and fails once its residual keeps what was refused."""

    def rule(*args, **kwargs):
        walk_siblings(*args, **kwargs, strike_refused=strike_refused)

    torch.manual_seed(0)
    value = p_value(sample_blocks([], rule), exact_block_probabilities([]), SAMPLES)
    assert value > 1e-3 if strike_refused else value < 1e-12


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}, {"repetition_penalty": 1.6}],
    ids=lambda settings: next(iter(settings), "none"),
)
def test_continuations_of_generate_have_the_targets_distribution(settings):
    """End to end: three sampled tokens, over several rounds, against the product of the target's probabilities."""
    target = tiny_target(vocab_size=6, num_hidden_layers=3, initializer_range=0.2)
    head = tiny_head(target)
    samples, length = 1500, 3
    input_ids = prompt_of(3, vocab=6)
    config = draft_config(do_sample=True, max_new_tokens=length, draft_depth=1, draft_top_k=3, **settings)
    torch.manual_seed(1)
    counts, accepted = Counter(), 0
    for _ in range(samples):
        ids = target.generate(input_ids, generation_config=config, assistant_model=head)
        counts[tuple(ids[0, 3:].tolist())] += 1
        accepted += head.last_statistics.accepted_tokens
    assert 0.1 * samples < accepted < 0.95 * samples
    assert p_value(counts, exact_continuations(target, input_ids, length, settings), samples) > 1e-3


def exact_continuations(target, input_ids, length, settings) -> dict:
    probabilities, memory = {}, {}
    for tokens in itertools.product(range(6), repeat=length):
        mass = 1.0
        for position in range(length):
            prefix = torch.cat((input_ids, torch.tensor([tokens[:position]], dtype=torch.long)), dim=1)
            mass *= next_token_probabilities(target, prefix, settings, memory)[tokens[position]]
        probabilities[tokens] = mass
    return probabilities


def next_token_probabilities(target, prefix, settings, memory):
    key = tuple(prefix[0].tolist())
    if key not in memory:
        config = GenerationConfig(
            do_sample=True, max_new_tokens=1, output_scores=True, return_dict_in_generate=True, **settings
        )
        # With its mask: `generate` would take the pad ids of a bare prompt for padding.
        mask = torch.ones_like(prefix)
        scores = target.generate(prefix, attention_mask=mask, generation_config=config).scores[0]
        memory[key] = scores.softmax(-1)[0].tolist()
    return memory[key]


def test_no_mass_left_to_draw_from_is_no_error():
    """EAGLE 45: 'probability tensor contains inf, nan' once the residual rounded to 0. Here p is one-hot on a child."""
    logits = torch.full((4, TOKENS), float("-inf"))
    logits[0, 2] = logits[2, 4] = 0.0
    sequence = Sequence(
        torch.tensor([[3, 5]]), stopping_criteria=NeverStop(), streamer=None,
        generation_config=GenerationConfig(max_length=100),
    )  # fmt: skip
    chooser = TokenChooser(LogitsProcessorList(), do_sample=True)
    assert accept(TREE, TargetPass(logits, None, None), chooser=chooser, sequence=sequence) == [0, 2]
    assert sequence.ids[0].tolist() == [3, 5, 2, 4]
