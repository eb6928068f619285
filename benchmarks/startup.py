"""How long a new process takes to its first answers: eager, by default, and on persisted compiled passes.

    python benchmarks/startup.py

Every run is a process of its own and says how long it took to load target and head, to bring the first token, and to
end an answer. Three rounds, modes in turns; medians count. The passes are built before, unless they exist.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
from provenance import RESULTS, provenance, write_json

from hf_heterospec import HeteroSpecGenerationConfig
from hf_heterospec.graphs import graphs_for
from hf_heterospec.targets import load_default_head, load_default_target

MODES = ("never", "auto", "always")  # of `draft_compile`
PARTS = ("loaded", "first_token", "answer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mode", choices=MODES, help="time one mode in this process, for the others")
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(measure(args)))
        return 0
    model, _ = load_default_target(getattr(torch, args.dtype))
    graphs_for(model, load_default_head(), "always")
    shared = ["--dtype", args.dtype, "--max-new-tokens", str(args.max_new_tokens)]
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(args.repeats):
        for mode in MODES:
            command = [sys.executable, __file__, "--mode", mode, *shared]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            runs[mode].append(json.loads(output.splitlines()[-1]))
    seconds = {
        mode: {part: round(statistics.median(run[part] for run in own), 2) for part in PARTS}
        for mode, own in runs.items()
    }
    more = seconds["always"]["answer"] - seconds["never"]["answer"]
    ratio = seconds["auto"]["first_token"] / seconds["never"]["first_token"]
    result = {
        "seconds": seconds,
        "persisted_passes_take_longer_by": round(more, 2),
        "first_token_auto_over_eager": ratio,
    }
    print(json.dumps(result, indent=1))
    write_json(RESULTS / f"startup-{args.dtype}.json", {"run": provenance(), **result})
    return 0 if more < 10 and ratio <= 1.2 else 1


def measure(args: argparse.Namespace) -> dict[str, float]:
    """One mode, in seconds: loading; the first token since then; a second call's whole answer with the first one's."""
    start = time.perf_counter()
    model, _ = load_default_target(getattr(torch, args.dtype))
    head = load_default_head()
    loaded = time.perf_counter()
    ids = torch.arange(64)[None] * 7919 % model.config.vocab_size
    seconds = {"loaded": loaded - start}
    for part, num_tokens in (("first_token", 1), ("answer", args.max_new_tokens)):
        config = HeteroSpecGenerationConfig(
            do_sample=False, max_new_tokens=num_tokens, pad_token_id=0, draft_compile=args.mode
        )
        model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=head, generation_config=config)
        seconds[part] = time.perf_counter() - loaded
    return seconds


if __name__ == "__main__":
    sys.exit(main())
