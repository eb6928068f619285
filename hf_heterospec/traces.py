"""Traces: what the head drafts at every position of the target's own answers. Policies are fitted and compared on them.

The target's greedy answer is the continuation that verification would follow. So from the values of all candidates at
a position, and from the places of those that continue the answer, one can say what *any* tree would have accepted
there, and a whole answer can be replayed under any policy: start at its first position, accept, jump
(`policy.simulation`).

    root                         path[p, 0] = 2: the answer goes on with the third candidate of level 1,
    |- 0   |- 1   |- 2           path[p, 1] = 10 + 37: and then with candidate 37 of level 2, a child of that one,
                  |- 10 + 37     path[p, 2] = -1: and then with a token that was not drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .beam import Level
from .configuration import DraftCompile, DraftSettings
from .drafting import HeteroSpecCandidateGenerator
from .graphs import graphs_for
from .head import HeteroSpecHead, gather_features
from .policy.entropy import Quantifier
from .policy.rounds import FixedRounds
from .repeats import MAX_COPIED, Repeats, copy

FORMAT = "heterospec-traces-2"
NOT_DRAFTED = -1


class TracedAnswer(NamedTuple):
    """What to trace: the ids of a prompt, and the target's greedy answer to it. `source` groups answers in reports."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    source: str = ""


@dataclass(frozen=True)
class Traces:
    """Drafts at P positions, answer by answer, in order. A position is named by its root, an answer token.

    C = k + (levels - 1) * k * k candidates, in drafting order: level by level, parent by parent, the parents being the
    k best of the level before. So depths and parents need not be stored.

    Attributes:
        top_k: k, the width of the beam.
        values: `[P, C]` float32, cumulative draft log-probabilities.
        entropies: `[P, levels, k]` float32, H of the paths to the beam's entries, best entry first, per `quantifier`.
        path: `[P, levels]` int16, index among the C of the candidate the answer goes on with, or -1.
        repeated: `[P]` int32, how many of the last tokens, the root included, stand earlier in the text (`repeats`).
        copied: `[P]` int32, how many of the tokens that follow there, up to `MAX_COPIED`, the answer goes on with.
        remaining: `[P]` int32, how many tokens the answer has after the root.
        position: `[P]` int32, the root's position in the text, prompt included.
        answer: `[P]` int32, which answer.
        sources: per answer, where its prompt came from.
        metadata: model, head and settings, for provenance.
    """

    top_k: int
    values: NDArray[np.float32]
    entropies: NDArray[np.float32]
    path: NDArray[np.int16]
    repeated: NDArray[np.int32]
    copied: NDArray[np.int32]
    remaining: NDArray[np.int32]
    position: NDArray[np.int32]
    answer: NDArray[np.int32]
    sources: tuple[str, ...]
    metadata: dict[str, str]

    @property
    def num_levels(self) -> int:
        return self.path.shape[1]

    def __len__(self) -> int:
        return self.path.shape[0]

    def level(self, level: int) -> slice:
        """Where the candidates of a level (from 1) lie among the C."""
        k = self.top_k
        return slice(0, k) if level == 1 else slice(k + (level - 2) * k * k, k + (level - 1) * k * k)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""
        arrays = {name: getattr(self, name) for name in ARRAYS}
        header = {"format": FORMAT, "top_k": str(self.top_k), "sources": "\n".join(self.sources), **self.metadata}
        save_file(arrays, str(path), metadata=header)

    @classmethod
    def load(cls, *paths: str | Path) -> Traces:
        """Read one or several files, which must have the same width and levels.

        Raises:
            ValueError: when a file is no trace, is damaged, or does not go with the others.
        """
        return cls.concatenate([cls._load_one(path) for path in paths])

    @classmethod
    def _load_one(cls, path: str | Path) -> Traces:
        try:
            with safe_open(str(path), framework="numpy") as file:
                header = dict(file.metadata() or {})
                arrays = {name: file.get_tensor(name) for name in file.keys() if name in ARRAYS}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} must be a trace file; it cannot be read ({error}). Write it with `heterospec trace`."
            ) from error
        if header.pop("format", None) != FORMAT or set(arrays) != set(ARRAYS):
            raise ValueError(
                f"{path} must be a trace file of format {FORMAT!r}; got tensors {sorted(arrays)}. "
                "Write it with `heterospec trace`."
            )
        sources = tuple(header.pop("sources").split("\n"))
        return cls(top_k=int(header.pop("top_k")), sources=sources, metadata=header, **arrays)

    @classmethod
    def concatenate(cls, traces: Sequence[Traces]) -> Traces:
        """One after the other, with the metadata of the first."""
        shapes = {(trace.top_k, trace.num_levels) for trace in traces}
        if len(shapes) != 1:
            raise ValueError(
                f"Traces put together must have one (top_k, levels); got {sorted(shapes)}. Trace again with the same "
                "settings, or fit on one of them."
            )
        offsets = np.cumsum([0, *(len(trace.sources) for trace in traces)])
        joined = {name: np.concatenate([getattr(trace, name) for trace in traces]) for name in ARRAYS}
        joined["answer"] = np.concatenate([t.answer + offset for t, offset in zip(traces, offsets, strict=False)])
        sources = tuple(source for trace in traces for source in trace.sources)
        return cls(top_k=traces[0].top_k, sources=sources, metadata=traces[0].metadata, **joined)


COUNTS = ("repeated", "copied", "remaining", "position", "answer")
ARRAYS = ("values", "entropies", "path", *COUNTS)


@torch.inference_mode()
def collect(
    model: PreTrainedModel,
    head: HeteroSpecHead,
    answers: Iterable[TracedAnswer],
    *,
    num_levels: int = 9,
    top_k: int = 10,
    every: int = 1,
    quantifier: Quantifier | None = None,
    compile: DraftCompile = "never",
    metadata: dict[str, str] | None = None,
    progress: bool = True,
) -> Traces:
    """Trace answers with the code that drafts in `generate`.

    One pass of the target over prompt and answer gives the features at every position; then the head drafts under
    each answer token.

    Args:
        answers: what the target answered, greedily.
        num_levels: levels to draft; a policy can be simulated up to this depth.
        every: trace every so-manieth position; replaying whole answers needs 1.
        quantifier: how entropies are computed.
        compile: whether the head drafts with compiled passes. That is faster, and values may round otherwise.
        metadata: kept with the traces.
    """
    quantifier = quantifier or Quantifier()
    settings = DraftSettings(depth=num_levels - 1, top_k=top_k, compile=compile)
    policy = FixedRounds(num_levels, settings.total_tokens, quantifier)
    rows: dict[str, list] = {name: [] for name in ARRAYS}
    sources: list[str] = []
    for answer in tqdm(answers, desc="tracing", unit="answer", disable=not progress):
        ids = torch.tensor([[*answer.prompt_ids, *answer.answer_ids]], device=model.device)
        text = KnownText(model, head, ids, settings=settings, policy=policy)
        first, end = len(answer.prompt_ids), ids.shape[1]
        tokens, repeats = ids[0].tolist(), Repeats()
        for root in range(first, end - 1, every):
            levels = text.draft_at(root, num_levels=num_levels)
            rows["values"].append(torch.cat([level.candidates.values for level in levels]).cpu())
            rows["entropies"].append(torch.stack([level.beam_entropies for level in levels]).cpu())
            rows["path"].append(_follow(levels, ids[0, root + 1 :]))
            repeat = repeats.find(tokens[: root + 1])
            rows["repeated"].append(repeat.length)
            copied = copy(tokens[: root + 1], repeat, MAX_COPIED) if repeat.length else []
            rows["copied"].append(_agreeing(copied, tokens[root + 1 :]))
            rows["remaining"].append(end - 1 - root)
            rows["position"].append(root)
            rows["answer"].append(len(sources))
        sources.append(answer.source)
    return Traces(
        top_k=top_k,
        values=torch.stack(rows["values"]).numpy(),
        entropies=torch.stack(rows["entropies"]).numpy(),
        path=np.array(rows["path"], dtype=np.int16),
        **{name: np.array(rows[name], dtype=np.int32) for name in COUNTS},
        sources=tuple(sources),
        metadata=metadata or {},
    )


class KnownText:
    """A text in which the head can draft at any position, as it would in `generate`: one pass of the target over it
    all gives the features.

    Args:
        ids: `[1, length]`.
        settings: `top_k` is the beam's width; `compile` whether the head drafts with compiled passes.
        policy: its quantifier, if it has one, gives the levels their entropies.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: HeteroSpecHead,
        ids: Tensor,
        *,
        settings: DraftSettings,
        policy: FixedRounds | None = None,
    ) -> None:
        self.width = settings.top_k
        graphs, _ = graphs_for(model, head, settings.compile)
        self.drafter = HeteroSpecCandidateGenerator(head, model, settings=settings, policy=policy, graphs=graphs)
        layer_ids = self.drafter.target_layer_ids
        outputs = model(ids, output_hidden_states=sorted(set(layer_ids)), use_cache=False, logits_to_keep=1)
        features = gather_features(outputs.hidden_states, layer_ids, model.device)
        positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
        self.hidden = self.drafter.observe(features[:, :-1], ids[:, 1:], positions)  # [1, length - 1, hidden]
        cache = self.drafter.cache
        self.stable = cache.keys.clone(), cache.values.clone()

    def draft_at(self, root: int, *, num_levels: int) -> list[Level]:
        """The levels under the token at position `root`, from the text up to there."""
        # The pair (feature at root - 1, root token) is the last one the head may see.
        self.drafter.rewind(root, self.hidden[:, root - 1 : root])
        levels = list(islice(self.drafter.draft(width=self.width), num_levels))
        cache, own_rows = self.drafter.cache, num_levels * self.width
        for rows_of, kept in zip((cache.keys, cache.values), self.stable, strict=True):
            # What was drafted overwrote rows that later positions see.
            rows_of[:, :, root : root + own_rows][:, :, : kept.shape[2] - root] = kept[:, :, root : root + own_rows]
        return levels


def _agreeing(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Length of the longest prefix that both have."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def _follow(levels: list[Level], continuation: Tensor) -> list[int]:
    """Per level, the index among all candidates of the one that goes on with `continuation`, or -1."""
    path, parent, first = [], -1, 0
    for level, token in zip(levels, continuation.tolist(), strict=False):
        candidates = level.candidates
        match = ((candidates.token_ids == token) & (candidates.parents == parent)).nonzero()
        if not len(match):
            break
        parent = first + int(match[0])
        path.append(parent)
        first += len(candidates.token_ids)
    return path + [NOT_DRAFTED] * (len(levels) - len(path))
