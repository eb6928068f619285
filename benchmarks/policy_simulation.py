"""Every policy on recorded traces: per set and in all, without a model.

    heterospec trace --prompts bench/*.jsonl --limit 16 --max-new-tokens 128 --out bench.safetensors
    python benchmarks/policy_simulation.py --policy hub_assets/SmolLM2-135M-Instruct-heterospec \
        --traces bench.safetensors

The best fixed tree is chosen in hindsight, on these very traces, over all sets together. `--against` takes the JSON of
a `heterospec bench` of the same prompts and numbers of tokens, and says how far simulated and real counts agree.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provenance import RESULTS, provenance, write_json

from hf_heterospec.benchmarking import Arm
from hf_heterospec.policy.costs import read_costs
from hf_heterospec.policy.fitting import best_fixed_tree
from hf_heterospec.policy.repository import PASSES, StratificationPolicy
from hf_heterospec.policy.rounds import FixedRounds, RoundPolicy
from hf_heterospec.policy.simulation import Replay, Simulator
from hf_heterospec.traces import Traces

NewPolicy = Callable[[], RoundPolicy]
COUNTS = ("target_calls", "verified_tokens")


def arms_of(policy: StratificationPolicy, simulator: Simulator, passes: str, names: list[str]) -> dict[str, NewPolicy]:
    """The arms of `heterospec bench` of these names; among others the default ones, of the base tree's depth and size,
    and the best fixed tree."""
    strata, costs = policy.strata, policy.costs_of(passes)
    depth, nodes, alpha = strata.depth, strata.num_nodes, math.ceil(strata.depth / 2)
    if not names:
        levels, size = best_fixed_tree(simulator, costs)
        base, best = (f"tree-{n}-{d}-{strata.top_k}" for n, d in ((nodes, depth), (size, levels - 1)))
        names = [base, "paper-unpruned", "paper", f"paper-alpha-{alpha - 1}", f"paper-alpha-{alpha + 1}", best]

    def new_policy(name: str) -> NewPolicy:
        arm = Arm.parse(name)
        match arm.draft:
            case {"draft_policy": "fixed", "draft_top_k": strata.top_k} as tree:
                return lambda: FixedRounds(tree["draft_depth"] + 1, tree["draft_total_tokens"])
            case {"draft_policy": "paper"}:
                return strata.with_tiers(**arm.tiers).rounds
            case {"draft_policy": "throughput"}:
                return lambda: policy.throughput.rounds(costs, max_levels=depth + 1, max_nodes=nodes)
        raise ValueError(f"Traces of a beam of {strata.top_k} cannot tell what {name} does. Leave it out.")

    return {name: new_policy(name) for name in dict.fromkeys([*names, "throughput-uncopied", "throughput"])}


def compare_with_run(results: dict[str, dict[str, Any]], run: Path) -> dict[str, dict[str, float]]:
    """Real over simulated, by arm, of the same prompts and answers."""
    rows = {row["arm"]: row for row in json.loads(run.read_text())["summaries"] if row["prompt_set"] == "mean"}
    return {
        name: {count: round(rows[name][count] / results[name]["all"][count], 4) for count in COUNTS}
        for name in results
        if name in rows
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
    parser.add_argument("--arms", nargs="+", default=[], help="as for `heterospec bench`, those with a policy")
    parser.add_argument("--against", type=Path, help="JSON of a real run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--passes", choices=PASSES, default="compiled", help="whose costs")
    parser.add_argument("--costs", type=Path, help="JSON with costs, of a real run for one, instead of the policy's")
    args = parser.parse_args()
    policy, simulator = StratificationPolicy.from_pretrained(args.policy), Simulator(Traces.load(*args.traces))
    if args.costs:
        policy = policy.with_costs(read_costs(args.costs))
    costs = policy.costs_of(args.passes)
    sets = [*dict.fromkeys(simulator.traces.sources), None]
    results: dict[str, dict[str, object]] = {}
    for name, new_policy in arms_of(policy, simulator, args.passes, args.arms).items():
        copies = (Arm.parse(name).draft or {}).get("draft_copies", True)
        replays = {source or "all": simulator.run(new_policy, costs, source=source, copies=copies) for source in sets}
        results[name] = {source: describe(replay) for source, replay in replays.items()}
        row = "  ".join(f"{source} {replay.speedup:.3f}" for source, replay in replays.items())
        total = replays["all"]
        print(f"{name:36s} {row}  tau {total.tau:.2f}  calls {total.rounds}  verified {total.verified_tokens}")
    oracle = simulator.run_oracle(costs)
    results["oracle"] = {"all": describe(oracle)}
    print(f"{'oracle':36s} all {oracle.speedup:.3f}  tau {oracle.tau:.2f}")
    about = {"costs": costs.to_dict(), "traces": simulator.traces.metadata, "policy": args.policy}
    record = {"provenance": provenance() | about, "arms": results}
    if args.against:
        record["real_over_simulated"] = compare_with_run(results, args.against)
        print(json.dumps(record["real_over_simulated"], indent=1))
    write_json(args.out or RESULTS / f"policy_simulation-{args.passes}.json", record)


if __name__ == "__main__":
    main()
