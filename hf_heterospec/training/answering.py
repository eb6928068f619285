"""Answering: prompts are decoded together, many rows at a time; a row that finishes makes room for the next prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .answers import REPEATED_RUN
from .slots import SlotCache, use_slot_attention


@dataclass(frozen=True)
class CorpusSettings:
    """How answers are generated.

    Attributes:
        rows: answers decoded together.
        max_new_tokens: an answer that has not ended by then is cut.
        max_prompt_tokens: longer prompts are left out.
        max_repeated_tokens: an answer is cut when so many of its tokens in a row repeat what it already said (they end
            runs of `REPEATED_RUN` tokens that it had before): small models loop, and a loop teaches nothing.
        temperature: 0 takes the most likely token; otherwise tokens are drawn at this temperature.
        seed: of the draws. An answer depends on it and on its prompt's id, not on what is decoded beside it.
        system: system prompt; `None` leaves it to the chat template.
        shard_size: answers per sealed file.
    """

    rows: int = 128
    max_new_tokens: int = 320
    max_prompt_tokens: int = 1536
    max_repeated_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0
    system: str | None = None
    shard_size: int = 2048

    def __post_init__(self) -> None:
        for name in ("rows", "max_new_tokens", "max_prompt_tokens", "max_repeated_tokens", "shard_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1; got {getattr(self, name)}.")
        if self.temperature < 0:
            raise ValueError(f"`temperature` must be 0 (greedy) or more; got {self.temperature}.")


class Prompt(NamedTuple):
    """A prompt to be answered. `row` is its line of the prompt file: what it says besides is copied to the answer."""

    id: str
    row: dict[str, Any]
    ids: list[int]


@dataclass
class Row:
    """An answer in progress."""

    prompt: Prompt
    response_ids: list[int] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)  # one uniform number per token to come, when sampling
    runs: set[tuple[int, ...]] = field(default_factory=set)  # of `REPEATED_RUN` tokens, seen in the answer
    num_repeated: int = 0  # tokens at the end that repeat earlier runs

    def append(self, token: int) -> None:
        self.response_ids.append(token)
        if len(self.response_ids) >= REPEATED_RUN:
            run = tuple(self.response_ids[-REPEATED_RUN:])
            self.num_repeated = self.num_repeated + 1 if run in self.runs else 0
            self.runs.add(run)


T = TypeVar("T")
TOKENS_PER_PREFILL = 2048


def prompt_length(prompt: Prompt) -> int:
    return len(prompt.ids)


def by_length(
    items: Iterable[T], length: Callable[[T], int], *, max_tokens: int, least_filled: float = 0.0
) -> Iterator[list[T]]:
    """Groups of items of like length, shortest first, to be padded to the longest of their group.

    Args:
        max_tokens: of a group with its padding, unless one item alone is longer.
        least_filled: share of a group's tokens that may not be padding.
    """
    group: list[T] = []
    tokens = 0
    for item in sorted(items, key=length):
        padded = (len(group) + 1) * length(item)
        if group and (padded > max_tokens or tokens + length(item) < least_filled * padded):
            yield group
            group, tokens = [], 0
        group.append(item)
        tokens += length(item)
    if group:
        yield group


class CorpusGenerator:
    """Answers prompts with many rows at a time.

    Args:
        model: a decoder-only target whose layers keep ordinary keys and values (no sliding window, no state).
        longest_prompt: in tokens.
        eos_ids: tokens that end an answer; the answer includes them.
    """

    def __init__(
        self, model: PreTrainedModel, *, settings: CorpusSettings, longest_prompt: int, eos_ids: set[int]
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        if other := set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}:
            raise ValueError(
                f"Corpus generation needs full attention in every layer; got {', '.join(sorted(other))}. "
                "Answer the prompts with another tool and pass its JSONL files to train-head."
            )
        self.model, self.settings, self.eos_ids = model, settings, eos_ids
        capacity = longest_prompt + settings.max_new_tokens
        self.cache = SlotCache(
            config.num_hidden_layers, num_slots=settings.rows, capacity=capacity, device=model.device
        )
        self.rows: list[Row] = []

    @torch.inference_mode()
    def run(self, prompts: Iterable[Prompt]) -> Iterator[Row]:
        """Yield finished answers, in the order in which they finish."""
        waiting = iter(prompts)
        with use_slot_attention(self.model):
            while True:
                free = self.settings.rows - len(self.rows)
                # A prefill of a few prompts costs little more than one of a single prompt: wait for a few free rows.
                if free >= max(1, self.settings.rows // 16) or not self.rows:
                    self._admit(list(islice(waiting, free)))
                if not self.rows:
                    return
                yield from self._retire()
                if self.rows:
                    self._step()

    def _admit(self, prompts: list[Prompt]) -> None:
        """Prefill prompts into free slots, and append the first token of each answer."""
        for group in by_length(prompts, prompt_length, max_tokens=TOKENS_PER_PREFILL, least_filled=0.9):
            lengths = [len(prompt.ids) for prompt in group]
            ids = torch.zeros(len(group), max(lengths), dtype=torch.long)
            for row, prompt in enumerate(group):  # padded on the right, where a causal row does not see it
                ids[row, : lengths[row]] = torch.tensor(prompt.ids)
            cache = DynamicCache()
            ends = torch.tensor(lengths, device=self.model.device) - 1
            kept, which = ends.unique(return_inverse=True)  # logits are computed at these positions of every row
            output = self.model(ids.to(self.model.device), cache=cache, logits_to_keep=kept)
            rows = [Row(prompt, draws=self._draws(prompt)) for prompt in group]
            self.cache.admit(cache, lengths, first_slot=len(self.rows))
            self._append(rows, output.logits[torch.arange(len(group), device=which.device), which])
            self.rows += rows

    def _step(self) -> None:
        """Decode one token in every row."""
        active = len(self.rows)
        positions, mask = self.cache.begin_step(active)
        ids = torch.tensor([[row.response_ids[-1]] for row in self.rows], device=self.model.device)
        output = self.model(ids, attention_mask=mask, position_ids=positions, cache=self.cache)
        self.cache.end_step(active)
        self._append(self.rows, output.logits[:, -1])

    def _append(self, rows: list[Row], logits: Tensor) -> None:
        if self.settings.temperature == 0:
            tokens = logits.float().argmax(dim=-1)  # in bf16 it takes five times as long on the CPU
        else:
            draws = torch.tensor([row.draws[len(row.response_ids)] for row in rows], device=logits.device)
            cumulative = (logits.float() / self.settings.temperature).softmax(dim=-1).cumsum(dim=-1)
            tokens = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:])[:, 0]
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.append(token)

    def _draws(self, prompt: Prompt) -> list[float]:
        if self.settings.temperature == 0:
            return []
        seed = hash_text(f"{self.settings.seed} {prompt.id}")
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(self.settings.max_new_tokens, generator=generator).tolist()

    def _is_finished(self, row: Row) -> bool:
        return (
            row.response_ids[-1] in self.eos_ids
            or len(row.response_ids) >= self.settings.max_new_tokens
            or row.num_repeated >= self.settings.max_repeated_tokens
        )

    def _retire(self) -> Iterator[Row]:
        """Yield the rows that are finished and close the gaps they leave with the last rows."""
        for slot in reversed(range(len(self.rows))):
            row = self.rows[slot]
            if self._is_finished(row):
                last = self.rows.pop()
                if slot < len(self.rows):
                    self.rows[slot] = last
                    self.cache.move(len(self.rows), slot)
                yield row


def hash_text(text: str) -> int:
    """A seed that is the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
