"""The tokens emitted so far, and everything `generate` promises per token: scores, stopping, streaming."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer


class Choice(NamedTuple):
    """The token the target emits after a node, and the processed scores it was chosen by, where there were any."""

    token_id: int
    scores: Tensor | None  # [1, vocab], fp32


class Sequence:
    """The growing text. `ids` is `[1, length]`; its last token has no row in the target's cache yet. `host_ids` and
    `tokens` are the same on the host."""

    def __init__(
        self,
        input_ids: Tensor,
        *,
        stopping_criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        generation_config: GenerationConfig,
    ) -> None:
        self.ids = input_ids
        self.host_ids = input_ids.cpu()
        self.tokens: list[int] = self.host_ids[0].tolist()
        self.streamer = streamer
        # Criteria of transformers are shown the text on the host, where their answer keeps nobody waiting for a device.
        self._host_criteria, self._criteria = StoppingCriteriaList(), StoppingCriteriaList()
        for criterion in stopping_criteria:
            is_upstream = type(criterion).__module__.startswith("transformers.")
            (self._host_criteria if is_upstream else self._criteria).append(criterion)
        self.max_length = generation_config.max_length
        self.finished = False
        wanted = bool(generation_config.return_dict_in_generate)
        self.scores: tuple[Tensor, ...] | None = () if wanted and generation_config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if wanted and generation_config.output_logits else None
        self.hidden_states: tuple[Any, ...] | None = () if wanted and generation_config.output_hidden_states else None

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_length - self.ids.shape[1]

    def emit(self, choice: Choice, logits: Tensor, hidden_states: tuple[Tensor, ...] | None) -> None:
        """Append one token. Sets `finished` when the text ends with it.

        Args:
            choice: the token.
            logits: `[1, vocab]`, what it was chosen from, before the processors.
            hidden_states: of the positions that led to it, per layer; recorded where the caller wants them.
        """
        if self.scores is not None:
            self.scores += (self._keep(logits if choice.scores is None else choice.scores),)
        if self.logits is not None:
            self.logits += (self._keep(logits),)
        if self.hidden_states is not None:
            self.hidden_states += (hidden_states,)
        token = self.host_ids.new_tensor([choice.token_id])
        self._append(token)
        self.tokens.append(choice.token_id)
        self.finished = self._stops()
        if self.streamer is not None:
            self.streamer.put(token)

    def _append(self, token: Tensor) -> None:
        on_host = self.ids is self.host_ids
        self.host_ids = torch.cat((self.host_ids, token[None]), dim=1)
        new = token[None].to(self.ids.device, non_blocking=True)
        self.ids = self.host_ids if on_host else torch.cat((self.ids, new), dim=1)

    def _stops(self) -> bool:
        """Asks every criterion, whatever the others say, as `generate` does."""
        finished = bool(self._host_criteria(self.host_ids, self.scores).all())
        if self._criteria:
            finished |= bool(self._criteria(self.ids, self.scores).all())
        return finished

    def _keep(self, row: Tensor) -> Tensor:
        # A copy: a view would keep the logits of the whole tree alive.
        return row.to(dtype=torch.float32, device=self.ids.device, copy=True)
