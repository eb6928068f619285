"""Drafting: the head's beam becomes a tree (EAGLE-2, section 4.1; EAGLE-3, section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import logging

from .beam import Level, first_level, next_level, read_back
from .configuration import DraftSettings
from .graphs import Graphs
from .head import HeadOutput, HeteroSpecHead, gather_features
from .machine import to_device
from .policy.repository import PolicyMismatchError
from .policy.rounds import OFF, DraftView, FixedRounds, RoundPolicy
from .repeats import Repeats, copy
from .tree import Candidates, DraftLimits, DraftTree

logger = logging.get_logger(__name__)


def choose_policy(
    head: HeteroSpecHead, settings: DraftSettings, device: torch.device, graphs: Graphs | None
) -> RoundPolicy:
    """The policy for one call. Where the head's fit can't serve it, the fixed tree, with a warning."""
    if settings.policy == "fixed":
        return FixedRounds(settings.depth + 1, settings.total_tokens)
    try:
        if head.policy is None:
            raise PolicyMismatchError("The head carries no policy; fit one with `heterospec fit-policy`.")
        compiled = graphs is not None and graphs.is_ready
        return head.policy.rounds(
            settings.policy,
            depth=settings.depth,
            top_k=settings.top_k,
            num_nodes=settings.total_tokens,
            device=device.type,
            passes="compiled" if compiled else "eager",
            measured=graphs.costs if graphs is not None and compiled else None,
            tiers=settings.tiers,
        )
    except PolicyMismatchError as error:
        logger.warning_once(f"draft_policy={settings.policy!r} drafts a fixed tree here. {error}")
        return FixedRounds(settings.depth + 1, settings.total_tokens)


class HeteroSpecCandidateGenerator(CandidateGenerator):
    """Drafts with a head: `observe` what the target has computed, then `propose` a tree.

    Where head and target meet, for features f and tokens x (the pair t is what the head sees at position t):

        target position    0     1     2     3
        features           f0    f1    f2    f3
        token at t + 1     x1    x2    x3    root        <- f3's logits emitted the root
        head position      0     1     2     3 | 4 ...   <- the tree's levels continue here

    It is also a transformers `CandidateGenerator`: upstream's own assisted-decoding loop can draw chains from it
    through `get_candidates`.

    Args:
        head: the head; it is moved to the device and dtype of the target's embeddings.
        model: the target, whose embeddings the head borrows.
        settings: depth, width and size of the tree.
        policy: decides each round's levels and nodes; `None` drafts the tree of `settings` every time.
    """

    requires_model_outputs = True

    def __init__(
        self,
        head: HeteroSpecHead,
        model: PreTrainedModel,
        *,
        settings: DraftSettings,
        policy: RoundPolicy | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.graphs = graphs
        self.target_layer_ids = head.layers_of(model)
        self.embeddings = model.get_input_embeddings()
        weight = self.embeddings.weight
        self.head = head.to(device=weight.device, dtype=weight.dtype)
        self.settings = settings
        self._fixed = FixedRounds(settings.depth + 1, settings.total_tokens)
        self.policy = policy or self._fixed
        self.tier = OFF  # what the last round drafted
        self.repeats = Repeats()
        self.cache = head.new_cache()
        self.next_position = torch.zeros(1, dtype=torch.long, device=weight.device)
        self.last: HeadOutput | None = None  # of the newest pair: [1, 1, hidden] and [1, draft_vocab]
        self._unseen: list[tuple[Tensor, Tensor]] = []  # pairs the head has yet to observe

    def observe(self, features: Tensor, next_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Append pairs to the head's stable cache, replacing whatever the last tree left there.

        Args:
            features: `[1, length, 3 * target_hidden]`, the target's.
            next_ids: `[1, length]`, for each feature the token after it.
            position_ids: `[1, length]`, the features' positions.

        Returns:
            `[1, length, hidden]`, the head's outputs; it drafts from the last one.
        """
        length, start = features.shape[1], self.cache.length
        graphs, mask = self._ready_graphs, _causal_mask(length, start, features) if start else None
        if graphs is not None and mask is not None:
            buffers = self.cache.reserve(start + length)
            place = to_device(start, features.device)
            hidden, log_probs = graphs.run("read", next_ids, features, position_ids, mask, place, *buffers)
        else:
            attention = {"position_ids": position_ids, "cache": self.cache, "start": start, "mask": mask}
            hidden, log_probs = self.head.read(self.embeddings, next_ids, features, **attention)
        self.cache.length += length
        self.last = HeadOutput(hidden[:, -1:], log_probs)
        self.next_position = position_ids[0, -1:] + 1
        return hidden

    def rewind(self, length: int, hidden: Tensor) -> None:
        """Stand where only the first `length` pairs were observed; `hidden` is `observe`'s output at the last of them,
        `[1, 1, hidden]`. The next draft overwrites the rows that follow."""
        self.cache.length = length
        self.last = HeadOutput(hidden, self.head.log_probs(hidden[0]))
        self.next_position = self.next_position * 0 + length

    def observe_prompt(self, features: Tensor, ids: Tensor, position_ids: Tensor, is_token: Tensor) -> None:
        """Take in the prompt and the first token after it.

        Args:
            features: `[1, length, 3 * target_hidden]`, of the positions the target has just computed.
            ids: `[1, at least length]`, ending in the first token emitted.
            position_ids: `[1, length]`.
            is_token: `[length]` bool, false at padding, which the head must not see.
        """
        known = min(features.shape[1], ids.shape[1])  # fewer ids than features where the prompt came as embeddings
        real = is_token[-known:].nonzero().squeeze(1)
        next_ids = ids[:, -known:].to(features.device)
        self.observe(features[:, -known:][:, real], next_ids[:, real], position_ids[:, -known:][:, real])

    def observe_accepted(self, features: Tensor, path: list[int], ids: Tensor) -> None:
        """Take in the accepted `path` of the last tree, with the target's features of its nodes.

        The head catches up when it drafts next: rounds without drafts cost it nothing, and one pass takes them all.

        Args:
            features: `[1, num_nodes, 3 * target_hidden]`, of the verified tree.
            ids: `[1, length]`, ending in the tokens emitted after the nodes of `path`.
        """
        nodes = to_device(path, features.device)
        self._unseen.append((features[:, nodes], ids[:, -len(path) :].to(features.device)))
        self.policy.end(accepted=len(path) - 1)

    def _catch_up(self) -> None:
        if not self._unseen:
            return
        features, next_ids = (torch.cat(parts, dim=1) for parts in zip(*self._unseen, strict=True))
        position_ids = self.next_position + torch.arange(next_ids.shape[1], device=next_ids.device)
        self.observe(features, next_ids, position_ids[None])
        self._unseen.clear()

    def propose(self, root: Tensor, limits: DraftLimits, tokens: Sequence[int] = ()) -> DraftTree:
        """Draft the tree under `root` (`[1]`, the token of the newest observed pair), within `limits`.

        The policy decides how many levels and nodes, or that the text is copied; `tier` says what it chose. Each of
        its decisions reads the values drafted since the last one back from the device, in one transfer.

        Args:
            tokens: the text so far, `root` last; none where nothing is to be copied.
        """
        max_levels, max_nodes = limits.num_levels, limits.num_nodes
        width = min(self.settings.top_k, limits.width)
        # A fit holds for one width: where the target takes only a chain, the chain has a fixed length.
        policy = self.policy if width == self.settings.top_k else self._fixed
        repeat = self.repeats.find(tokens)
        step = policy.begin(
            max_levels=max_levels, max_nodes=max_nodes, repeated=repeat.length, max_copied=limits.num_copied
        )
        if step.num_copied:
            self.tier = step.tier
            return DraftTree.chain(root, copy(tokens, repeat, step.num_copied))
        if min(step.num_levels, max_levels, width) < 1 or max_nodes < 2:
            self.tier = OFF
            return DraftTree.root_only(root)
        self._catch_up()
        levels: list[Level] = []
        unread: list[Level] = []
        draft = DraftView()
        for level in self.draft(width=width):
            levels.append(level)
            unread.append(level)
            if len(levels) < min(step.num_levels, max_levels):
                continue
            if step.num_nodes is None:
                read_back(unread, draft, num_values=max_nodes - 1, quantifier=policy.quantifier)
                step = policy.decide(draft)
            if step.num_nodes is not None and len(levels) >= min(step.num_levels, max_levels):
                break
        self.tier = step.tier
        assert step.num_nodes is not None
        if step.num_nodes < 2:
            return DraftTree.root_only(root)
        return DraftTree.best_of(root, [level.candidates for level in levels], min(step.num_nodes, max_nodes))

    def draft_levels(self, num_levels: int, *, width: int) -> list[Candidates]:
        """Draft a beam of `width` k for `num_levels` levels. The first holds k nodes, every further one k * k."""
        return [level.candidates for level in islice(self.draft(width=width), num_levels)]

    def draft(self, *, width: int) -> Iterator[Level]:
        """Draft a beam of `width` k, level by level, for as long as it is asked to."""
        width = min(width, self.head.config.draft_vocab_size)
        quantifier = self.policy.quantifier
        assert self.last is not None, "observe comes before drafting"
        level = first_level(self.head, *self.last, width=width, length=self.cache.length)
        level = level.with_entropies(quantifier, None, depth=1)
        for depth in count(1):
            yield level
            level = self._expand(level, depth=depth).with_entropies(quantifier, level, depth=depth + 1)

    def _expand(self, level: Level, *, depth: int) -> Level:
        """The head's pass over the beam of `level`."""
        inputs = (level.beam, level.token_ids, level.values, level.hidden, level.mask, self.next_position)
        length, graphs = self.cache.length, self._ready_graphs
        if graphs is None:
            return next_level(self.head, self.embeddings, *inputs, depth=depth, length=length, cache=self.cache)
        buffers = self.cache.reserve(length + depth * level.width)
        places = (to_device(number, level.beam.device) for number in (depth, length))
        return Level(*graphs.run("expand", *inputs, *places, *buffers))

    @property
    def _ready_graphs(self) -> Graphs | None:
        return self.graphs if self.graphs is not None and self.graphs.is_ready else None

    # transformers' own loop

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        return {"output_hidden_states": self.target_layer_ids}

    @property
    def num_drafting_tokens(self) -> int:
        """As many states as upstream's loop lets recurrent layers keep: the chain of `get_candidates` and the token
        before it. With one fewer, a chain rejected as a whole has no state to go back to."""
        return self.settings.depth + 2

    def get_candidates(
        self, input_ids: Tensor, *, model_outputs: Any = None, n_last_matches: int = 0, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """The greedy chain after `input_ids` (`[1, length]`), for upstream's assisted decoding.

        The first call comes before the target has computed anything and proposes nothing.
        """
        if model_outputs is None:
            return input_ids, None
        features = gather_features(model_outputs.hidden_states, self.target_layer_ids, self.head.device)
        if self.cache.length:
            features = features[:, : int(n_last_matches) + 1]
        length, end = features.shape[1], input_ids.shape[1] - 1
        position_ids = torch.arange(end - length, end, device=input_ids.device)[None]
        self.observe(features, input_ids[:, -length:], position_ids)
        chain = Candidates.concat(self.draft_levels(self.settings.depth + 1, width=1))
        return torch.cat((input_ids, chain.token_ids[None]), dim=1), None


def _causal_mask(length: int, start: int, like: Tensor) -> Tensor:
    """Additive mask of `length` new rows behind `start` old ones: `[length, start + length]`."""
    seen = torch.ones(length, start + length, dtype=torch.bool, device=like.device).tril(diagonal=start)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(
        ~seen, torch.finfo(like.dtype).min
    )
