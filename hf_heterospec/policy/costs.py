"""What a round costs on one machine (the T of the throughput rule).

Costs are facts of a machine, a dtype and a compile setting; calibration is a fact of a head. They are kept apart, so
that a shared policy can be given the costs of the machine it runs on (`hf_heterospec.measuring`).
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Costs:
    """Milliseconds per round, in parts.

    Attributes:
        target: per number of nodes, one pass of the target over so many. Between entries it is linear, beyond the
            last as well.
        draft_first: the head catching up with what was accepted, and the first level.
        draft_level: each further level.
        fixed: the rest of every round, drafted or not: acceptance, stopping criteria, bookkeeping.
        machine: where this was measured, for people and for `device`.
    """

    target: tuple[tuple[int, float], ...]
    draft_first: float
    draft_level: float
    fixed: float = 0.0
    machine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.target]
        numbers = [*(cost for _, cost in self.target), self.draft_first, self.draft_level, self.fixed]
        if not sizes or sizes[0] != 1 or sizes != sorted(set(sizes)):
            raise ValueError(
                f"`target` costs must be given for rising numbers of nodes from 1 on; got {sizes}. Measure them again."
            )
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or self.target[0][1] <= 0:
            raise ValueError(f"Costs must be finite and not negative; got {numbers}. Measure them again.")

    @property
    def device(self) -> str | None:
        """Type of the device the costs were measured on, as torch names it."""
        return self.machine.get("device")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of nodes that were measured."""
        return tuple(size for size, _ in self.target)

    def target_pass(self, num_nodes: int) -> float:
        """One pass of the target over `num_nodes` tokens."""
        sizes = self.sizes
        if len(sizes) == 1:
            return self.target[0][1]
        place = min(max(bisect.bisect_left(sizes, num_nodes), 1), len(sizes) - 1)
        (left, low), (right, high) = self.target[place - 1], self.target[place]
        cost = low + (high - low) * (num_nodes - left) / (right - left)
        return max(cost, high) if num_nodes > right else cost

    def drafting(self, num_levels: int) -> float:
        """Drafting so many levels."""
        return self.draft_first + (num_levels - 1) * self.draft_level if num_levels else 0.0

    def round(self, num_levels: int, num_nodes: int) -> float:
        """A whole round; `round(0, 1)` is plain decoding."""
        return self.fixed + self.drafting(num_levels) + self.target_pass(num_nodes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, milliseconds."""
        return {
            "target_ms": [list(pair) for pair in self.target],
            "draft_first_ms": self.draft_first,
            "draft_level_ms": self.draft_level,
            "fixed_ms": self.fixed,
            "machine": dict(self.machine),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Costs:
        """What `to_dict` gives. Raises ValueError, naming the field, for anything else."""
        try:
            return cls(
                target=tuple((int(size), float(cost)) for size, cost in data["target_ms"]),
                draft_first=float(data["draft_first_ms"]),
                draft_level=float(data["draft_level_ms"]),
                fixed=float(data["fixed_ms"]),
                machine=dict(data.get("machine", {})),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"`costs` must hold target_ms, draft_first_ms, draft_level_ms and fixed_ms as numbers; got {error!r}. "
                "Measure them again with `heterospec fit-policy --only-costs`."
            ) from error


def read_costs(path: Path) -> dict[str, Costs]:
    """Costs by kind of passes, as `policy.json`, the results of `heterospec bench` and the file that `heterospec
    compile` writes hold them.

    Raises:
        ValueError: when the file holds none, or impossible ones.
    """
    try:
        return {passes: Costs.from_dict(costs) for passes, costs in json.loads(path.read_text())["costs"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no sound costs ({error!r}). Measure them with `heterospec compile`.") from error
