"""The loop: draft, verify, accept, commit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from .acceptance import TokenChooser, accept
from .configuration import DraftSettings
from .drafting import HeteroSpecCandidateGenerator, choose_policy
from .graphs import graphs_for
from .head import HeteroSpecHead
from .policy.rounds import OFF
from .sequence import Sequence
from .statistics import SpeculationStatistics, Stopwatch
from .target import Target, with_room_for_trees
from .tree import DraftTree


@dataclass
class HeteroSpecOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput`, and in `speculation` the statistics of the call."""

    speculation: SpeculationStatistics | None = None


def decode(
    model: PreTrainedModel,
    head: HeteroSpecHead,
    input_ids: Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> HeteroSpecOutput | Tensor:
    """Decode one sequence with draft trees: what `GenerationMixin._assisted_decoding` is for assistants.

    The output distribution is exactly that of `generate` without an assistant (see `acceptance`).

    Args:
        input_ids: `[1, length]`.
        model_kwargs: what `generate` prepared for the model's forward, the cache included.

    Returns:
        `[1, new_length]` ids, or with `return_dict_in_generate=True` a `HeteroSpecOutput`.
    """
    settings = DraftSettings.resolve(generation_config, head.generation_config)
    drafts = settings.policy != OFF
    graphs, status = graphs_for(model, head, settings.compile)
    policy = choose_policy(head, settings, model.device, graphs) if drafts else None
    if policy is not None:  # its largest tree is what there must be room for
        settings = replace(settings, depth=policy.max_levels - 1, total_tokens=policy.max_nodes)
    layer_ids = head.layers_of(model) if drafts else []
    model_kwargs["cache"] = with_room_for_trees(
        model, model_kwargs["cache"], max_length=generation_config.max_length, num_nodes=settings.total_tokens
    )
    target = Target(model, model_kwargs, layer_ids=layer_ids, generation_config=generation_config, graphs=graphs)
    sequence = Sequence(
        input_ids, stopping_criteria=stopping_criteria, streamer=streamer, generation_config=generation_config
    )
    chooser = TokenChooser(logits_processor, do_sample=bool(generation_config.do_sample))
    statistics, clock = SpeculationStatistics(), Stopwatch(model.device)

    with clock.measure("prefill"):
        prompt = target.prefill(input_ids, most_nodes=settings.total_tokens)
        statistics.graphs = target.describe_passes(status)
        accept(DraftTree.root_only(input_ids.new_zeros(1)), prompt, chooser=chooser, sequence=sequence)
        drafter = None
        if drafts:
            drafter = HeteroSpecCandidateGenerator(head, model, settings=settings, policy=policy, graphs=graphs)
            drafter.observe_prompt(prompt.features, sequence.ids, *target.prompt_positions(prompt.features.shape[1]))

    with clock.measure("decode"):
        while not sequence.finished:
            limits = target.limits(settings, num_remaining=sequence.num_remaining)
            with clock.measure("head"):
                root = sequence.ids[0, -1:].to(model.device)
                if drafter is None:
                    tree = DraftTree.root_only(root)
                else:
                    tree = drafter.propose(root, limits, sequence.tokens)
            with clock.measure("target"):
                scores = target.verify(tree)
            path = accept(tree, scores, chooser=chooser, sequence=sequence)
            target.commit(path, tree.num_nodes)
            if drafter is not None and not sequence.finished:
                with clock.measure("head"):
                    drafter.observe_accepted(scores.features, path, sequence.ids)
            tier = OFF if drafter is None else drafter.tier
            statistics.record_round(tree, accepted=len(path) - 1, tier=tier)

    if streamer is not None:
        streamer.end()
    cache = target.finish()
    statistics.record_time(clock.seconds())
    if graphs is not None:
        graphs.count_eager(clock.seconds().get("decode", 0.0))
    head.last_statistics = statistics
    if not generation_config.return_dict_in_generate:
        return sequence.ids
    return HeteroSpecOutput(
        sequences=sequence.ids,
        scores=sequence.scores,
        logits=sequence.logits,
        hidden_states=sequence.hidden_states,
        cache=cache,
        speculation=statistics,
    )
