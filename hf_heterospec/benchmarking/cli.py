"""`heterospec bench` and `heterospec compile`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration import DraftCompile
from ..graphs import graphs_for
from ..head import HeteroSpecHead
from ..machine import AUTO, DTYPES, resolve_dtype
from ..measuring import measure_costs
from ..targets import load_pair
from .arms import DEFAULT_ARMS, PLAIN, SYNTAX, Arm
from .plot import plot
from .prompts import load_prompt_sets
from .provenance import describe_run
from .report import MEAN, Summary, on_hardest, over_best_tree, overall, summarise, table, verdict
from .runs import RecordFile, run_arms


def add_parsers(subparsers: Any) -> None:
    """Add both subcommands to an argparse `subparsers` object."""
    bench = subparsers.add_parser("bench", help="compare policies, trees, chains and plain decoding on prompt sets")
    bench.add_argument("prompts", nargs="+", help="JSONL files, or folders of them")
    bench.add_argument("--arms", nargs="+", default=list(DEFAULT_ARMS), metavar="ARM", help=SYNTAX)
    bench.add_argument("--num-prompts", type=int, default=20, help="per set (default: 20)")
    bench.add_argument("--max-new-tokens", type=int, default=128)
    bench.add_argument("--repeats", type=int, default=1)
    bench.add_argument(
        "--output", type=Path, help="JSON with summaries, records and provenance; an interrupted run goes on"
    )
    bench.add_argument("--plot", type=Path, help="bar chart, e.g. bench.png (needs matplotlib)")
    bench.add_argument("--compile", choices=("always", "auto", "never"), default="always", help="of arms with a head")
    bench.add_argument("--json", action="store_true", help="print one JSON object per arm and set, and nothing else")
    bench.set_defaults(run=run_bench)
    compile_ = subparsers.add_parser("compile", help="build compiled passes ahead of time, and measure what they cost")
    compile_.set_defaults(run=run_compile)
    for parser in (bench, compile_):
        parser.add_argument("--target", help="folder or repository (default: SmolLM2-135M-Instruct)")
        parser.add_argument("--head", help="folder or repository (default: the head for SmolLM2-135M-Instruct)")
        parser.add_argument(
            "--dtype",
            choices=DTYPES,
            default="auto",
            help=AUTO,
        )
        parser.add_argument("--device", default="cpu")


def run_bench(args: argparse.Namespace) -> int:
    """Measure, print a table and a verdict; returns 0."""
    arms = [Arm.parse(name, compile=args.compile) for name in args.arms]
    prompt_sets = load_prompt_sets(args.prompts, num_prompts=args.num_prompts)
    model, tokenizer, head = _load(args)
    settings = {
        "arms": args.arms,
        "sets": {name: len(prompts) for name, prompts in prompt_sets.items()},
        **{
            name: getattr(args, name)
            for name in ("max_new_tokens", "repeats", "compile", "target", "head", "dtype", "device")
        },
    }
    done = RecordFile(args.output.with_suffix(".records.jsonl"), settings) if args.output else None
    provenance = describe_run(model.device)
    records = run_arms(
        model,
        tokenizer,
        head,
        arms=arms,
        prompt_sets=prompt_sets,
        max_new_tokens=args.max_new_tokens,
        repeats=args.repeats,
        done=done,
    )
    summaries = summarise(records)
    hardest = {arm.name: on_hardest(records, arm.name) for arm in arms if arm.speculates}
    over_tree = over_best_tree(records, summaries, "throughput")
    bandwidth = provenance["machine"]["read_gigabytes_per_second"]
    if args.json:
        for row in summaries:
            print(json.dumps(row.to_dict()))
    else:
        print(table(summaries))
        print(_against_bandwidth(summaries, [record for record in records if record.arm == PLAIN], model, bandwidth))
        print(verdict(summaries))
        for arm, ratio in hardest.items():
            if ratio is not None:
                print(f"On the 20 prompts that {arm} drafts worst for: {ratio:.2f}x {PLAIN}.")
        if over_tree:
            tree, ratios = over_tree
            print(
                f"throughput over {tree}, the best fixed tree: {ratios[MEAN]:.2f}, {min(ratios.values()):.2f} at least."
            )
    if args.output:
        args.output.write_text(
            json.dumps(
                {
                    "settings": settings,
                    "provenance": provenance,
                    "verdict": verdict(summaries),
                    "over_plain_on_the_20_hardest_prompts": hardest,
                    "throughput_over_best_fixed_tree": over_tree,
                    "summaries": [row.to_dict() for row in summaries],
                    "graphs": sorted({record.graphs for record in records if record.graphs}),
                    "costs": _costs_decided_by(model, head, args.compile),
                },
                indent=1,
            )
            + "\n"
        )
    if args.plot:
        plot(summaries, args.plot)
    return 0


def run_compile(args: argparse.Namespace) -> int:
    """Build the passes and measure what they cost here, which policies then decide by; returns 0.

    Raises:
        ValueError: where the target cannot be compiled.
    """
    model, _, head = _load(args)
    graphs, status = graphs_for(model, head, "always")
    assert graphs is not None  # "always" raises instead
    graphs.keep_costs(measure_costs(model, head, draft_compile="always"))
    print(f"{status}: {graphs.spec.folder}")
    return 0


def _load(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, HeteroSpecHead]:
    if args.target is not None and not args.head:
        raise ValueError("--target needs its head; got no --head. Pass a head trained for that target.")
    args.dtype = resolve_dtype(args.dtype, args.device)
    return load_pair(args.target, args.head or None, dtype=getattr(torch, args.dtype), device=args.device)


def _costs_decided_by(model: PreTrainedModel, head: HeteroSpecHead, compile: DraftCompile) -> dict[str, Any]:
    """The costs that the head's policy decides by, by kind of passes."""
    if head.policy is None:
        return {}
    graphs, _ = graphs_for(model, head, compile)
    compiled = head.policy.costs_of("compiled", measured=graphs.costs if graphs is not None else None)
    return {"eager": head.policy.costs_of("eager").to_dict(), "compiled": compiled.to_dict()}


def _against_bandwidth(summaries: list[Summary], plain: list[Any], model: PreTrainedModel, bandwidth: float) -> str:
    """The compiled one-token pass beside the time it takes to read the weights once."""
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    floor = weight_bytes / bandwidth / 1e6
    line = f"Weights: {weight_bytes / 1e6:.0f} MB; at {bandwidth:.0f} GB/s one pass takes at least {floor:.1f} ms."
    rounds = sum(record.rounds or 0 for record in plain)
    if rounds:
        measured = 1000 * sum(record.split["target"] for record in plain if record.split) / rounds
        line += f" Measured for one token ({PLAIN}): {measured:.1f} ms."
    slowest = max((row.split or {}).get("other", 0.0) for row in overall(summaries))
    return f"{line} Neither head nor target: at most {100 * slowest:.1f} % of the time."
