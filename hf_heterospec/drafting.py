"""Drafting: the head's beam becomes a tree (EAGLE-2, section 4.1; EAGLE-3, section 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from .configuration import DraftSettings
from .head import HeteroSpecHead, gather_features
from .tree import Candidates, DraftLimits, DraftTree


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
    """

    requires_model_outputs = True

    def __init__(self, head: HeteroSpecHead, model: PreTrainedModel, *, settings: DraftSettings) -> None:
        self.target_layer_ids = head.layers_of(model)
        self.embeddings = model.get_input_embeddings()
        weight = self.embeddings.weight
        self.head = head.to(device=weight.device, dtype=weight.dtype)
        self.settings = settings
        self.cache = head.new_cache()
        self.next_position = torch.zeros(1, dtype=torch.long, device=weight.device)
        self.last_hidden: Tensor | None = None  # [1, 1, hidden], of the newest pair

    def observe(self, features: Tensor, next_ids: Tensor, position_ids: Tensor) -> None:
        """Append pairs to the head's stable cache, replacing whatever the last tree left there.

        Args:
            features: `[1, length, 3 * target_hidden]`, the target's.
            next_ids: `[1, length]`, for each feature the token after it.
            position_ids: `[1, length]`, the features' positions.
        """
        length, start = features.shape[1], self.cache.length
        mask = None if start == 0 else _causal_mask(length, start, features)
        hidden = self.head(
            self.embeddings(next_ids),
            self.head.fc(features),
            position_ids=position_ids,
            cache=self.cache,
            start=start,
            mask=mask,
        )
        self.cache.length += length
        self.last_hidden = hidden[:, -1:]
        self.next_position = position_ids[0, -1:] + 1

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
        """Replace the last tree by its accepted `path`, with the target's features of its nodes.

        Args:
            features: `[1, num_nodes, 3 * target_hidden]`, of the verified tree.
            ids: `[1, length]`, ending in the tokens emitted after the nodes of `path`.
        """
        length = len(path)
        position_ids = self.next_position + torch.arange(length, device=features.device)
        nodes = torch.tensor(path, device=features.device)
        self.observe(features[:, nodes], ids[:, -length:].to(features.device), position_ids[None])

    def propose(self, root: Tensor, limits: DraftLimits) -> DraftTree:
        """Draft the tree under `root` (`[1]`, the token of the newest observed pair), within `limits`."""
        num_levels = min(self.settings.depth + 1, limits.num_levels)
        num_nodes = min(self.settings.total_tokens, limits.num_nodes)
        width = min(self.settings.top_k, limits.width)
        if num_levels < 1 or num_nodes < 2 or width < 1:
            return DraftTree.root_only(root)
        return DraftTree.best_of(root, self.draft_levels(num_levels, width=width), num_nodes)

    def draft_levels(self, num_levels: int, *, width: int) -> list[Candidates]:
        """Draft a beam of `width` k for `num_levels` levels. The first holds k nodes, every further one k * k."""
        width = min(width, self.head.config.draft_vocab_size)
        values, draft_ids = self.head.log_probs(self.last_hidden[0]).topk(width)  # [1, k]
        level = Candidates(
            token_ids=self.head.draft_to_target(draft_ids[0]),
            parents=draft_ids.new_full((width,), -1),
            depths=draft_ids.new_ones(width),
            values=values[0],
        )
        levels, first_index = [level], 0
        beam = torch.arange(width, device=draft_ids.device)  # places in the newest level
        hidden = self.last_hidden.expand(1, width, -1)
        own = torch.zeros(width, 0, dtype=torch.bool, device=draft_ids.device)  # ancestors of each beam entry
        for depth in range(1, num_levels):
            own = torch.cat((own, torch.eye(width, dtype=torch.bool, device=own.device)), dim=1)
            hidden = self._expand(level.token_ids[beam], hidden, own, depth)
            log_probs, draft_ids = self.head.log_probs(hidden[0]).topk(width)  # [k, k]
            children = Candidates(
                token_ids=self.head.draft_to_target(draft_ids).flatten(),
                parents=(first_index + beam).repeat_interleave(width),
                depths=draft_ids.new_full((width * width,), depth + 1),
                values=(level.values[beam, None] + log_probs).flatten(),
            )
            first_index += level.token_ids.shape[0]
            levels.append(children)
            level = children
            beam = level.values.sort(descending=True, stable=True).indices[:width]
            rows = beam // width  # which beam entry each new one descends from
            hidden, own = hidden[:, rows], own[rows]
        return levels

    def _expand(self, token_ids: Tensor, features: Tensor, own: Tensor, depth: int) -> Tensor:
        """The head's pass over one level of the beam, `[1, k, hidden]`; its rows go behind the stable ones."""
        width, length = token_ids.shape[0], self.cache.length
        sees_context = torch.ones(width, length, dtype=torch.bool, device=own.device)
        return self.head(
            self.embeddings(token_ids[None]),
            features,
            position_ids=(self.next_position + depth - 1).expand(1, width),
            cache=self.cache,
            start=length + (depth - 1) * width,
            mask=_additive(torch.cat((sees_context, own), dim=1), features.dtype),  # [k, length + depth * k]
        )

    # transformers' own loop

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        return {"output_hidden_states": self.target_layer_ids}

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
    return _additive(seen, like.dtype)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
