"""From draft confidence to the probability of acceptance, fitted on traces and evaluated on the host.

Three families of tables, all rising curves by isotonic regression (scikit-learn):

* `acceptance[l](V)`: the chance that a node of level l + 1 with cumulative log-probability V is accepted;
* `forecast[l][h](m)`: the chance that the accepted path reaches level l + h + 2, given the calibrated chance m that
  it reaches level l + 1: what further levels are worth before they are drafted;
* `copies[k](r)`: the chance that k + 1 tokens copied from the text are all right, where its last r tokens stand earlier
  in it (`repeats`).

V and m are all that is asked of the head: entropy, rank and recent acceptance beside them were tried, and bring next to
nothing (`docs/policy.md`).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..repeats import MAX_COPIED

if TYPE_CHECKING:
    from ..traces import Traces

NUM_KNOTS = 40
SMALLEST = 1e-4  # probabilities below are not told apart
HORIZON = 4  # levels a forecast looks ahead
MAX_NODES = 63  # nodes per level that are looked at
FORECAST_NODES = 32  # a level counts as reached when its accepted node is among so many best of the tree


@dataclass(frozen=True)
class Curve:
    """A rising curve through knots, linear between them and constant beyond."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a <= b for numbers in (self.x, self.y) for a, b in itertools.pairwise(numbers))
        if not self.x or len(self.x) != len(self.y) or not rising:
            raise ValueError(f"A curve needs as many rising x as rising y; got x={self.x}, y={self.y}. Fit it again.")
        if not all(math.isfinite(number) for number in (*self.x, *self.y)) or not 0 <= self.y[0] <= self.y[-1] <= 1:
            raise ValueError(f"A curve's knots must be finite and its y within 0 and 1; got {self.y}. Fit it again.")

    def at(self, x: float) -> float:
        """The curve at one x, without an array."""
        right = bisect.bisect_left(self.x, x)
        if right == 0:
            return self.y[0]
        if right == len(self.x):
            return self.y[-1]
        left = right - 1
        share = (x - self.x[left]) / (self.x[right] - self.x[left])
        return self.y[left] + share * (self.y[right] - self.y[left])

    def __call__(self, x: ArrayLike) -> NDArray[np.float64]:
        return np.interp(np.asarray(x), self.x, self.y)

    def to_dict(self) -> dict[str, list[float]]:
        return {"x": list(self.x), "y": list(self.y)}

    @classmethod
    def fit(cls, x: NDArray, y: NDArray, *, num_knots: int = NUM_KNOTS) -> Curve:
        """Isotonic regression of `y` on `x`, thinned to about `num_knots` knots: half of them at equal distances in y,
        half at equal ratios, since it is the small probabilities that decide how many nodes are verified."""
        from sklearn.isotonic import IsotonicRegression

        model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(x, y)
        knots_x, knots_y = model.X_thresholds_, model.y_thresholds_
        low, high = max(knots_y[0], SMALLEST), max(knots_y[-1], SMALLEST)
        wanted = np.concatenate((np.linspace(low, high, num_knots // 2), np.geomspace(low, high, num_knots // 2)))
        keep = sorted({0, len(knots_x) - 1, *np.searchsorted(knots_y, wanted).clip(max=len(knots_x) - 1).tolist()})
        return cls(*(tuple(knots[keep].astype(np.float64).round(5).tolist()) for knots in (knots_x, knots_y)))


@dataclass(frozen=True)
class Calibration:
    """All curves, for one head and one beam width.

    Attributes:
        top_k: width of the beam.
        acceptance: per level, V in nats to the chance that the node is accepted.
        forecast: per level, per further level up to `HORIZON`.
        copies: per number of copied tokens; none where the text is not to be copied.
    """

    top_k: int
    acceptance: tuple[Curve, ...]
    forecast: tuple[tuple[Curve, ...], ...]
    copies: tuple[Curve, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.acceptance) == len(self.forecast) > 0:
            raise ValueError(
                f"Calibration needs acceptance and forecast curves for the same levels; got {len(self.acceptance)} and "
                f"{len(self.forecast)}. Fit it again."
            )

    @property
    def num_levels(self) -> int:
        return len(self.acceptance)

    def reach(self, chances: Sequence[float]) -> float:
        """The chance m that the accepted path reaches a level, from its nodes' chances, best first: at most one of the
        beam is right."""
        return min(sum(chances[: self.top_k]), 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "top_k": self.top_k,
            "acceptance": [curve.to_dict() for curve in self.acceptance],
            "forecast": [[curve.to_dict() for curve in curves] for curves in self.forecast],
            "copies": [curve.to_dict() for curve in self.copies],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """What `to_dict` gives. Raises ValueError for anything else."""

        def curve(knots: Mapping[str, Sequence[float]]) -> Curve:
            return Curve(tuple(map(float, knots["x"])), tuple(map(float, knots["y"])))

        try:
            return cls(
                top_k=int(data["top_k"]),
                acceptance=tuple(map(curve, data["acceptance"])),
                forecast=tuple(tuple(map(curve, curves)) for curves in data["forecast"]),
                copies=tuple(map(curve, data.get("copies", ()))),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"`calibration` must hold top_k, acceptance and forecast curves; got {error!r}. Fit the policy again."
            ) from error


def fit_calibration(traces: Traces, ranks: NDArray[np.int16], *, max_nodes: int = MAX_NODES) -> Calibration:
    """Fit all curves. Deterministic.

    Args:
        traces: positions, of any answers.
        ranks: `simulation.path_ranks(traces)`.
        max_nodes: nodes of a level that can come into a tree; the others are left out.
    """
    acceptance, reach = [], []
    for level in range(traces.num_levels):
        values, accepted = level_nodes(traces, level + 1, max_nodes=max_nodes)
        curve = Curve.fit(values.ravel(), accepted.ravel().astype(np.float64))
        acceptance.append(curve)
        reach.append(np.minimum(curve(values[:, : traces.top_k]).sum(axis=1), 1))
    forecast = []
    for level in range(traces.num_levels):
        ahead = range(level + 1, min(level + 1 + HORIZON, traces.num_levels))
        reached = [(ranks[:, deeper, deeper] >= 0) & (ranks[:, deeper, deeper] < FORECAST_NODES) for deeper in ahead]
        forecast.append(tuple(Curve.fit(reach[level], hit.astype(np.float64)) for hit in reached))
    return Calibration(traces.top_k, tuple(acceptance), tuple(forecast), fit_copies(traces))


def fit_copies(traces: Traces) -> tuple[Curve, ...]:
    """The curves of `Calibration.copies`, as far as there are repeats with so many tokens behind them."""
    curves: list[Curve] = []
    for num_tokens in range(1, MAX_COPIED + 1):
        known = (traces.repeated > 0) & (traces.remaining >= num_tokens)
        if not known.any():
            break
        curves.append(Curve.fit(traces.repeated[known], (traces.copied[known] >= num_tokens).astype(np.float64)))
    return tuple(curves)


def level_nodes(traces: Traces, level: int, *, max_nodes: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Values of a level's best nodes, best first, and whether each was accepted; `[positions, nodes]` both."""
    place = traces.level(level)
    values = traces.values[:, place]
    accepted = np.zeros(values.shape, dtype=bool)
    rows = np.flatnonzero(traces.path[:, level - 1] >= 0)
    accepted[rows, traces.path[rows, level - 1] - place.start] = True
    order = np.argsort(-values, axis=1, kind="stable")[:, :max_nodes]
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(accepted, order, axis=1)
