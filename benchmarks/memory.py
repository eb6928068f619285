"""Peak memory of decoding: with the head, and stock `generate` with a static cache of the same length (Linux).

    python benchmarks/memory.py --context 512 --max-new-tokens 256

Every arm runs in a process of its own: it loads target and head, decodes a little, forgets the peak so far, and decodes
in earnest. What is reported is the largest resident size from then on, weights and libraries included, and how much
that is above the size before decoding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from provenance import RESULTS, provenance, write_json

from hf_heterospec import HeteroSpecGenerationConfig
from hf_heterospec.targets import load_default_head, load_default_target

ARMS = ("stock", "default tree", "throughput", "throughput, compiled")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--arm", choices=ARMS, help="measure one arm in this process, for the others")
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(measure(args)))
        return 0
    shared = ["--context", str(args.context), "--max-new-tokens", str(args.max_new_tokens), "--dtype", args.dtype]
    rows = {}
    for arm in ARMS:
        command = [sys.executable, __file__, "--arm", arm, *shared]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows[arm] = json.loads(output.splitlines()[-1])
    for row in rows.values():
        row["over_stock"] = round(row["peak_mib"] / rows["stock"]["peak_mib"], 3)
    settings = {"context": args.context, "max_new_tokens": args.max_new_tokens, "dtype": args.dtype}
    write_json(RESULTS / f"memory-{args.dtype}.json", {"settings": settings, "run": provenance(), "arms": rows})
    print(json.dumps(rows, indent=1))
    return 0 if max(rows[arm]["over_stock"] for arm in ARMS if "compiled" not in arm) <= 1.25 else 1


def measure(args: argparse.Namespace) -> dict[str, float]:
    """One arm."""
    model, _ = load_default_target(getattr(torch, args.dtype))
    ids = torch.arange(args.context)[None] * 7919 % model.config.vocab_size

    def decode(num_tokens: int) -> None:
        fields = {"do_sample": False, "max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "pad_token_id": 0}
        if args.arm == "stock":
            # `disable_compile`: the static cache alone, without the compiled forward it would bring.
            model.generate(
                ids, attention_mask=torch.ones_like(ids), cache_implementation="static", disable_compile=True, **fields
            )
            return
        policy = "fixed" if args.arm == "default tree" else "throughput"
        config = HeteroSpecGenerationConfig(
            draft_policy=policy, draft_compile="always" if "compiled" in args.arm else "never", **fields
        )
        model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=head, generation_config=config)

    head = load_default_head() if args.arm != "stock" else None
    decode(8)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at the present size
    before = resident("VmRSS")
    decode(args.max_new_tokens)
    return {"peak_mib": resident("VmHWM"), "before_mib": before}


def resident(field: str) -> float:
    """MiB, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024, 1)


if __name__ == "__main__":
    sys.exit(main())
