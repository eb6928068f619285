"""Drafts from the text itself: where its end stood before, what followed there may follow again.

Prompt lookup (Saxena 2023), which transformers offers as `prompt_lookup_num_tokens`. Summaries quote, code repeats
itself, small models loop; such a draft costs no pass of the head. Whether it is worth a round, the policy decides
(`policy.throughput`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LONGEST_REPEAT = 8  # tokens; longer repeats are not told apart
MAX_COPIED = 15  # tokens of one draft


class Repeat(NamedTuple):
    """How many of the last tokens stand earlier in the text as well (0, or 2 to `LONGEST_REPEAT`), and the index of
    the token that follows there."""

    length: int
    next: int


class Repeats:
    """An index of one growing text.

    Every position links to the one before at which the same two tokens end, so that only places that agree in two
    tokens are compared.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}
        self._earlier: list[int | None] = []

    def find(self, tokens: Sequence[int]) -> Repeat:
        """The longest repeat at the end of `tokens`, which continue those of the last call; the latest among equals."""
        for end in range(len(self._earlier), len(tokens)):
            pair = (tokens[end - 1] if end else -1, tokens[end])
            self._earlier.append(self._latest.get(pair))
            self._latest[pair] = end
        best = Repeat(0, 0)
        place = self._earlier[-1] if self._earlier else None
        while place is not None and best.length < LONGEST_REPEAT:
            length = 2
            while length < LONGEST_REPEAT and place >= length and tokens[place - length] == tokens[-1 - length]:
                length += 1
            if length > best.length:
                best = Repeat(length, place + 1)
            place = self._earlier[place]
        return best


def copy(tokens: Sequence[int], repeat: Repeat, num_tokens: int) -> list[int]:
    """The `num_tokens` tokens that follow if the text goes on like there; a repeat that runs into its own copy goes
    round."""
    period = len(tokens) - repeat.next
    return [tokens[repeat.next + index % period] for index in range(num_tokens)]
