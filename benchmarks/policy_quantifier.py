"""Readings of the complexity quantifier that the paper leaves open, compared on traces.

    python benchmarks/policy_quantifier.py ANSWERS.jsonl --limit 8

For each reading: rank correlation of H(P*) with the tokens that the base tree gets accepted (the more negative, the
more H(P*) says), and with TCR over the positions accepted to full depth (the paper's figure 4: positive).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from provenance import RESULTS, provenance, write_json
from scipy.stats import spearmanr

from hf_heterospec.policy.entropy import Quantifier
from hf_heterospec.policy.simulation import Simulator
from hf_heterospec.targets import load_default_head, load_default_target
from hf_heterospec.traces import TracedAnswer, collect
from hf_heterospec.training.answers import read_jsonl

DEPTH, NODES = 5, 60
COLLECTED = {
    "all steps, K=10": Quantifier(),
    "without the root's": Quantifier(steps="without_root"),
    "last step only": Quantifier(steps="last"),
    "K=5": Quantifier(top_k=5),
    "K=3": Quantifier(top_k=3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--every", type=int, default=12, help="take every so-manieth answer")
    args = parser.parse_args()
    rows = list(read_jsonl(args.answers))[:: args.every][: args.limit]
    answers = [TracedAnswer(row["prompt_ids"], row["response_ids"], row["source"]) for row in rows]
    (model, _), head = load_default_target(torch.bfloat16), load_default_head()
    results = {}
    for name, collected in COLLECTED.items():
        traces = collect(model, head, answers, num_levels=DEPTH + 1, quantifier=collected, progress=False)
        paths = ("best", "mean", "expected") if collected == Quantifier() else ("best",)
        for path in paths:
            simulator = Simulator(traces, quantifier=Quantifier(collected.top_k, path, collected.steps))
            entropy, ranks = simulator.entropies[:, DEPTH], simulator.ranks[:, :, DEPTH]
            accepted = np.cumprod((ranks >= 0) & (ranks < NODES - 1), axis=1).sum(axis=1)
            full = accepted == DEPTH + 1
            results[f"{name}, path {path}"] = {
                "accepted": round(float(spearmanr(entropy, accepted)[0]), 3),
                "TCR at full depth": round(float(spearmanr(entropy[full], ranks[full, DEPTH])[0]), 3),
                "positions": len(traces),
                "at full depth": int(full.sum()),
            }
            print(name, path, results[f"{name}, path {path}"], flush=True)
    write_json(RESULTS / "policy_quantifier.json", {"provenance": provenance(), "readings": results})


if __name__ == "__main__":
    main()
