"""What the target knows about each answer, computed once and kept on disk.

A head learns from three of the target's hidden states at every position, and from the target's distribution over the
next token at the positions of the answer. Both are computed in one forward pass and written to shards: safetensors
files of a few hundred answers, memory-mapped when read.

    position      0 .. P-1        P .. n-1           P = prompt length, n = total length
    token         prompt          answer
    feature       yes             yes                hidden states that the head reads
    target        -               yes                top-k of the distribution over the token at position + 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from .answers import Answer


class Example(NamedTuple):
    """One answer with its features, on the CPU."""

    input_ids: Tensor  # [n] int32
    prompt_length: int
    features: Tensor  # [n, 3 * target hidden], the target's dtype
    target_ids: Tensor  # [n - P, k] int32, most likely first
    target_logits: Tensor  # [n - P, k]


@torch.inference_mode()
def target_pass(
    model: PreTrainedModel, answers: Sequence[Answer], *, layers: Sequence[int], top_k: int
) -> Iterator[Example]:
    """One forward pass over a padded batch of answers; yields an `Example` for each, in order.

    Padding is on the right and unmasked: a causal model's rows do not see it.
    """
    longest = max(answer.length for answer in answers)
    first = min(len(answer.prompt_ids) for answer in answers)  # no logits before any answer begins
    ids = torch.zeros(len(answers), longest, dtype=torch.long)
    for row, answer in enumerate(answers):
        ids[row, : answer.length] = torch.tensor(answer.prompt_ids + answer.response_ids)
    output = model(
        input_ids=ids.to(model.device),
        output_hidden_states=list(layers),
        use_cache=False,
        logits_to_keep=torch.arange(first, longest, device=model.device),
    )
    features = torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)  # [batch, longest, 3 * hidden]
    logits, top_ids = output.logits.topk(top_k, dim=-1)  # [batch, longest - first, k]
    for row, answer in enumerate(answers):
        begin, end = len(answer.prompt_ids), answer.length
        yield Example(
            ids[row, :end].int(),
            begin,
            features[row, :end].cpu(),
            top_ids[row, begin - first : end - first].int().cpu(),
            logits[row, begin - first : end - first].cpu(),
        )


def write_shard(path: Path, examples: Sequence[Example]) -> None:
    """Write a shard in one step: a kill leaves either no file or a whole one."""
    tensors = {
        "input_ids": torch.cat([example.input_ids for example in examples]),
        "lengths": torch.tensor([example.input_ids.numel() for example in examples]),
        "prompt_lengths": torch.tensor([example.prompt_length for example in examples]),
        "features": torch.cat([example.features for example in examples]),
        "target_ids": torch.cat([example.target_ids for example in examples]),
        "target_logits": torch.cat([example.target_logits for example in examples]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.rename(path)


class ShardReader:
    """Examples of one shard file, read by index without loading the rest.

    Raises:
        ValueError: naming the file, when it is truncated or no shard.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.file = safe_open(path, framework="pt")
            lengths = self.file.get_tensor("lengths")
            self.prompt_lengths = self.file.get_tensor("prompt_lengths")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} must be a whole feature shard; got a file that cannot be read ({error}). "
                "Delete it: it will be computed again."
            ) from error
        self.answer_lengths: list[int] = (lengths - self.prompt_lengths).tolist()
        zero = torch.zeros(1, dtype=torch.long)
        self.rows = torch.cat((zero, lengths.cumsum(0))).tolist()
        self.targets = torch.cat((zero, (lengths - self.prompt_lengths).cumsum(0))).tolist()

    def __len__(self) -> int:
        return len(self.answer_lengths)

    def __getitem__(self, index: int) -> Example:
        rows = slice(self.rows[index], self.rows[index + 1])
        targets = slice(self.targets[index], self.targets[index + 1])
        return Example(
            self.file.get_slice("input_ids")[rows],
            int(self.prompt_lengths[index]),
            self.file.get_slice("features")[rows],
            self.file.get_slice("target_ids")[targets],
            self.file.get_slice("target_logits")[targets],
        )


class Selection:
    """Some of a shard's examples.

    Args:
        indices: which, in the order they are given out.
    """

    def __init__(self, shard: ShardReader, indices: Sequence[int]) -> None:
        self.shard, self.indices = shard, indices
        self.answer_lengths = [shard.answer_lengths[index] for index in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Example:
        return self.shard[self.indices[index]]
