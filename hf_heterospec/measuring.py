"""Measures what rounds cost on this machine, by running the decoding loop itself.

Whatever `generate` does in a round is in the numbers: graphs, masks, acceptance, bookkeeping.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from sklearn.isotonic import IsotonicRegression
from tqdm.auto import tqdm
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from .configuration import HeteroSpecGenerationConfig
from .head import HeteroSpecHead
from .machine import device_name
from .policy.costs import Costs

logger = logging.get_logger(__name__)

SIZES = (2, 4, 8, 12, 16, 24, 32, 48, 60)


@torch.inference_mode()
def measure_costs(
    model: PreTrainedModel,
    head: HeteroSpecHead,
    *,
    sizes: Sequence[int] = SIZES,
    num_levels: int = 5,
    context: int = 200,
    num_rounds: int = 16,
    repeats: int = 5,
    progress: bool = True,
    **generation: Any,
) -> Costs:
    """Time rounds of plain decoding, of trees of several sizes, and of drafts of several depths.

    Each configuration runs `repeats` times, in turns, and its median counts.

    Args:
        model: the target.
        head: its head.
        sizes: numbers of nodes to time, besides 1.
        num_levels: how deep to draft when timing a level.
        context: tokens in front of the timed rounds.
        num_rounds: tokens per run, and so about as many rounds.
        generation: further fields of the generation config, `draft_compile` for one.
    """
    ids = torch.arange(context, device=model.device)[None] * 7919 % head.config.vocab_size
    trees = [(2, size) for size in sizes] + [(1, sizes[0]), (num_levels, sizes[-1])]
    runs = [(0, 1), *trees]
    seconds: dict[tuple[int, int], list[dict[str, float]]] = {run: [] for run in runs}
    order = list(itertools.chain.from_iterable(runs for _ in range(repeats + 1)))
    for place, run in enumerate(tqdm(order, desc="measuring costs", disable=not progress)):
        measured = _time_rounds(model, head, ids, levels=run[0], nodes=run[1], num_rounds=num_rounds, **generation)
        if place >= len(runs):  # the first turn warms up
            seconds[run].append(measured)

    def milliseconds(run: tuple[int, int], part: str) -> float:
        return round(1000 * statistics.median(measured[part] for measured in seconds[run]), 3)

    first, last = milliseconds((1, sizes[0]), "head"), milliseconds((num_levels, sizes[-1]), "head")
    passes = [milliseconds((0, 1), "target"), *(milliseconds((2, size), "target") for size in sizes)]
    # More nodes never cost less; where a measurement says so, it is noise.
    passes = IsotonicRegression().fit_transform([1, *sizes], passes).round(3).tolist()
    return Costs(
        target=tuple(zip((1, *sizes), passes, strict=True)),
        draft_first=first,
        draft_level=round(max(last - first, 0) / (num_levels - 1), 3),
        fixed=round(statistics.median(milliseconds(run, "other") for run in runs), 3),
        machine=describe_machine(model) | {"context": context, **generation},
    )


def measure_all_costs(model: PreTrainedModel, head: HeteroSpecHead, **kwargs: Any) -> dict[str, Costs]:
    """Costs of eager passes, and of compiled ones where the model can be compiled. `kwargs` as for `measure_costs`."""
    costs = {"eager": measure_costs(model, head, draft_compile="never", **kwargs)}
    try:
        costs["compiled"] = measure_costs(model, head, draft_compile="always", **kwargs)
    except (RuntimeError, ValueError) as error:
        logger.warning(f"Costs of compiled passes are left out. {error}")
    return costs


def _time_rounds(
    model: PreTrainedModel,
    head: HeteroSpecHead,
    ids: torch.Tensor,
    *,
    levels: int,
    nodes: int,
    num_rounds: int,
    **generation: Any,
) -> dict[str, float]:
    """Mean seconds per round, in the parts of `SpeculationStatistics.seconds`."""
    end = ids.shape[1] + num_rounds + 1
    # Far beyond `end`: near the length limit drafts are shorter.
    most = num_rounds + 8 * (levels + 1)
    config = HeteroSpecGenerationConfig(
        draft_policy="fixed" if levels else "off",
        draft_depth=max(levels - 1, 0),
        draft_total_tokens=nodes,
        max_new_tokens=most,
        eos_token_id=None,
        do_sample=False,
        pad_token_id=0,
        **generation,
    )
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=head,
        generation_config=config,
        stopping_criteria=StoppingCriteriaList([_LongEnough(end)]),
    )
    statistics = head.last_statistics
    assert statistics is not None
    return {part: value / statistics.rounds for part, value in statistics.seconds.items()}


class _LongEnough(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = input_ids.shape[1] >= self.length
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)


def describe_machine(model: PreTrainedModel) -> dict[str, Any]:
    """The machine, as far as it explains costs."""
    return {
        "device": model.device.type,
        "name": device_name(model.device),
        "instructions": torch.backends.cpu.get_cpu_capability() if model.device.type == "cpu" else None,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }
