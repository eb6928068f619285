"""Every policy on recorded traces: per set and in all, without a model.

    heterospec trace --prompts bench/*.jsonl --limit 16 --max-new-tokens 128 --out bench.safetensors
    python benchmarks/policy_simulation.py --policy hub_assets/SmolLM2-135M-Instruct-heterospec \
        --traces bench.safetensors

The best fixed tree is chosen in hindsight, on these very traces, over all sets together.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from provenance import RESULTS, provenance, write_json

from hf_heterospec.policy.fitting import best_fixed_tree
from hf_heterospec.policy.repository import PASSES, StratificationPolicy
from hf_heterospec.policy.rounds import FixedRounds, RoundPolicy
from hf_heterospec.policy.simulation import Replay, Simulator
from hf_heterospec.policy.stratification import paper_tiers
from hf_heterospec.traces import Traces


def arms_of(policy: StratificationPolicy, simulator: Simulator, passes: str) -> dict[str, Callable[[], RoundPolicy]]:
    """Name to policy: the base tree, the best fixed one, the paper's with its ablations, the throughput rule."""
    strata, costs = policy.strata, policy.costs_of(passes)
    depth, nodes, alpha = strata.depth, strata.num_nodes, math.ceil(strata.depth / 2)
    levels, size = best_fixed_tree(simulator, costs)

    def paper(**changes: object) -> Callable[[], RoundPolicy]:
        return dataclasses.replace(strata, tiers=paper_tiers(depth, nodes, **changes)).rounds

    return {
        f"EAGLE-3 ({depth + 1} levels, {nodes} nodes)": lambda: FixedRounds(depth + 1, nodes),
        "+DED": paper(prune=False),
        "+DED +TNP (paper)": paper(),
        "paper, alpha - 1": paper(alpha=alpha - 1),
        "paper, alpha + 1": paper(alpha=alpha + 1),
        f"best fixed tree ({levels} levels, {size} nodes)": lambda: FixedRounds(levels, size),
        "throughput": lambda: policy.throughput.rounds(costs, max_levels=depth + 1, max_nodes=nodes),
    }


def describe(replay: Replay) -> dict[str, object]:
    return {
        "speedup": round(replay.speedup, 3),
        "tau": round(replay.tau, 3),
        "target_calls": replay.rounds,
        "verified_tokens": replay.verified_tokens,
        "tokens": replay.tokens,
        "tiers": dict(replay.tiers.most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", required=True, help="folder or repository of a policy.json")
    parser.add_argument("--traces", type=Path, nargs="+", required=True)
    parser.add_argument("--passes", choices=PASSES, default="compiled", help="whose costs")
    args = parser.parse_args()
    policy, simulator = StratificationPolicy.from_pretrained(args.policy), Simulator(Traces.load(*args.traces))
    costs = policy.costs_of(args.passes)
    sets = [*dict.fromkeys(simulator.traces.sources), None]
    results: dict[str, dict[str, object]] = {}
    for name, new_policy in arms_of(policy, simulator, args.passes).items():
        replays = {source or "all": simulator.run(new_policy, costs, source=source) for source in sets}
        results[name] = {source: describe(replay) for source, replay in replays.items()}
        row = "  ".join(f"{source} {replay.speedup:.3f}" for source, replay in replays.items())
        total = replays["all"]
        print(f"{name:36s} {row}  tau {total.tau:.2f}  calls {total.rounds}  verified {total.verified_tokens}")
    oracle = simulator.run_oracle(costs)
    results["oracle"] = {"all": describe(oracle)}
    print(f"{'oracle':36s} all {oracle.speedup:.3f}  tau {oracle.tau:.2f}")
    about = {"costs": costs.to_dict(), "traces": simulator.traces.metadata, "policy": args.policy}
    write_json(RESULTS / f"policy_simulation-{args.passes}.json", {"provenance": provenance() | about, "arms": results})


if __name__ == "__main__":
    main()
