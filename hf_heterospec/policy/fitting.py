"""From traces to a policy: strata, calibration, and the two numbers that simulation settles. Deterministic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .calibration import fit_calibration
from .costs import Costs
from .entropy import Quantifier
from .repository import HeadReference, StratificationPolicy
from .rounds import FixedRounds
from .simulation import Replay, Simulator
from .stratification import fit_strata
from .throughput import ThroughputRule

if TYPE_CHECKING:
    from ..traces import Traces

PATIENCES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.8)
NODES_PER_LEVEL = (2, 4, 6, 8)
GRID_LEVELS = (1, 2, 3, 4, 5, 6, 7)
GRID_NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 60)


def fit_policy(
    traces: Traces,
    costs: Mapping[str, Costs],
    *,
    head: HeadReference,
    depth: int = 5,
    num_nodes: int = 60,
    quantifier: Quantifier | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> StratificationPolicy:
    """Fit everything for one head.

    Args:
        traces: every position of the target's answers to prompts that no benchmark uses.
        costs: of the machine, for eager or compiled passes or both. The compiled ones, if given, settle `patience` and
            `nodes_per_level`, and nothing else.
        head: which head the traces are of.
        depth, num_nodes: the base tree of the paper's policy.
        quantifier: the one the traces were made with.

    Raises:
        ValueError: when the traces are too shallow, too few, or not of every position.
    """
    if traces.num_levels < depth + 1:
        raise ValueError(f"A base depth of {depth} needs traces of {depth + 1} levels; got {traces.num_levels}.")
    quantifier = quantifier or Quantifier()
    simulator = Simulator(traces, quantifier=quantifier)
    strata = fit_strata(
        traces,
        simulator.entropies,
        reached_full_depth(simulator.ranks, depth=depth, num_nodes=num_nodes),
        depth=depth,
        num_nodes=num_nodes,
        quantifier=quantifier,
    )
    settling = costs.get("compiled") or costs["eager"]
    rule = fit_throughput(simulator, settling, num_nodes=num_nodes)
    about = {
        "positions": len(traces),
        "answers": len(traces.sources),
        "sources": {source: traces.sources.count(source) for source in sorted(set(traces.sources))},
        **traces.metadata,
        **(provenance or {}),
    }
    return StratificationPolicy(head, strata, rule, costs, provenance=about)


def reached_full_depth(ranks: NDArray[np.int16], *, depth: int, num_nodes: int) -> NDArray[np.bool_]:
    """`[positions]`: whether the tree of this depth and size is accepted down to its last level."""
    path = ranks[:, : depth + 1, depth]
    return np.all((path >= 0) & (path < num_nodes - 1), axis=1)


def fit_throughput(simulator: Simulator, costs: Costs, *, num_nodes: int) -> ThroughputRule:
    """Calibrate, and take the patience and nodes per level that decode the traced answers fastest."""
    calibration = fit_calibration(simulator.traces, simulator.ranks)
    rules = [ThroughputRule(calibration, patience, nodes) for patience in PATIENCES for nodes in NODES_PER_LEVEL]
    return max(rules, key=lambda rule: run_rule(simulator, rule, costs, num_nodes=num_nodes).speedup)


def run_rule(simulator: Simulator, rule: ThroughputRule, costs: Costs, *, num_nodes: int = 60, **kwargs: Any) -> Replay:
    """Replay the throughput policy."""
    levels = simulator.traces.num_levels
    return simulator.run(lambda: rule.rounds(costs, max_levels=levels, max_nodes=num_nodes), costs, **kwargs)


def best_fixed_tree(
    simulator: Simulator,
    costs: Costs,
    *,
    levels: Sequence[int] = GRID_LEVELS,
    nodes: Sequence[int] = GRID_NODES,
) -> tuple[int, int]:
    """(levels, nodes) of the fixed tree that decodes the traced answers fastest."""
    grid = [(level, size) for level in levels if level <= simulator.traces.num_levels for size in nodes]
    return max(grid, key=lambda tree: simulator.run(lambda: FixedRounds(*tree), costs).speedup)


def compare(
    simulator: Simulator, policy: StratificationPolicy, *, passes: str = "compiled", hindsight: bool = True
) -> dict[str, Replay]:
    """Every arm on the same traces: default tree, best fixed tree (chosen on these very traces, if `hindsight`),
    paper policy, throughput policy, and an oracle that knows what will be accepted."""
    costs, strata = policy.costs_of(passes), policy.strata
    arms = {
        "plain": simulator.run(lambda: FixedRounds(0, 1), costs),
        f"default tree ({strata.depth + 1} levels, {strata.num_nodes} nodes)": simulator.run(
            lambda: FixedRounds(strata.depth + 1, strata.num_nodes), costs
        ),
        "paper": simulator.run(strata.rounds, costs),
    }
    if hindsight:
        levels, nodes = best_fixed_tree(simulator, costs)
        arms[f"best fixed tree ({levels} levels, {nodes} nodes)"] = simulator.run(
            lambda: FixedRounds(levels, nodes), costs
        )
    arms["throughput"] = run_rule(simulator, policy.throughput, costs, num_nodes=strata.num_nodes)
    arms["oracle"] = simulator.run_oracle(costs)
    return arms
