"""`heterospec demo`: one prompt, decoded with the head and plainly, side by side."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedModel, TextStreamer

from .configuration import DraftCompile, HeteroSpecGenerationConfig
from .exactness import first_difference
from .head import HeteroSpecHead
from .targets import load_default_head, load_default_target

PROMPT = "Write a Python function that checks whether a number is prime, and explain how it works."
WARM_UP_TOKENS = 8


def add_parsers(subparsers: Any) -> None:
    parser = subparsers.add_parser("demo", help="decode a prompt with and without the shipped head, and compare")
    parser.add_argument("--prompt", default=PROMPT, help="what to ask SmolLM2-135M-Instruct")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                        help="bfloat16 is faster; near-ties may then round to another token")  # fmt: skip
    parser.add_argument("--eager", action="store_true", help="do not compile (the first time takes a minute)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the comparison; exit code 1 when the outputs differ."""
    say = (lambda text: None) if args.json else (lambda text: print(text, file=sys.stderr, flush=True))
    say("Loading SmolLM2-135M-Instruct (the first time unpacks it, about 20 seconds) ...")
    model, tokenizer = load_default_target(getattr(torch, args.dtype))
    head = load_default_head()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    if not args.eager:
        say("Compiling (the first time takes about a minute) ...")
    passes = _warm_up(model, inputs, head, "never" if args.eager else "always")

    streamer = None if args.json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    length = {"max_new_tokens": args.max_new_tokens}
    ids, seconds = _timed(model, inputs, head, draft_compile=passes, streamer=streamer, **length)
    statistics = head.last_statistics
    assert statistics is not None
    say("\nDecoding the same prompt plainly ...")
    plain_ids, plain_seconds = _timed(model, inputs, None, **length)
    undrafted_ids, undrafted_seconds = _timed(model, inputs, head, draft_policy="off", draft_compile=passes, **length)

    prompt_length = inputs["input_ids"].shape[1]
    num_new = ids.shape[1] - prompt_length
    difference = first_difference(model, ids, plain_ids, prompt_length=prompt_length)
    result = {
        "equal": torch.equal(ids, plain_ids),
        "first_difference": difference._asdict() if difference else None,
        "speedup": plain_seconds / seconds * num_new / (plain_ids.shape[1] - prompt_length),
        "tau": statistics.tau,
        "tokens_per_second": num_new / seconds,
        "plain_tokens_per_second": (plain_ids.shape[1] - prompt_length) / plain_seconds,
        "undrafted_tokens_per_second": (undrafted_ids.shape[1] - prompt_length) / undrafted_seconds,
        "new_tokens": num_new,
        "verified_tokens": statistics.verified_tokens,
        "rounds": statistics.rounds,
        "tiers": dict(statistics.tiers),
        "graphs": statistics.graphs,
        "dtype": args.dtype,
        "answer": tokenizer.decode(ids[0, -num_new:], skip_special_tokens=True),
    }
    print(json.dumps(result) if args.json else _report(result))
    return 0 if result["equal"] else 1


def _warm_up(model: PreTrainedModel, inputs: BatchEncoding, head: HeteroSpecHead, passes: DraftCompile) -> DraftCompile:
    """Run everything once. Returns `"never"` where passes cannot be compiled (no C++ compiler, say)."""
    _timed(model, inputs, None, max_new_tokens=WARM_UP_TOKENS)
    try:
        _timed(model, inputs, head, draft_compile=passes, max_new_tokens=WARM_UP_TOKENS)
    except (RuntimeError, ValueError) as error:
        print(f"Going on without compiled passes: {error}", file=sys.stderr)
        return _warm_up(model, inputs, head, "never")
    return passes


def _timed(
    model: PreTrainedModel, inputs: BatchEncoding, head: HeteroSpecHead | None, streamer: Any = None, **settings: Any
) -> tuple[torch.Tensor, float]:
    config = HeteroSpecGenerationConfig(do_sample=False, **settings)
    start = time.perf_counter()
    ids = model.generate(**inputs, assistant_model=head, generation_config=config, streamer=streamer)
    return ids, time.perf_counter() - start


def _report(result: dict[str, Any]) -> str:
    equal = "yes" if result["equal"] else "no"
    if difference := result["first_difference"]:
        equal += (
            f" (new token {difference['position'] + 1}: the two candidates' logits differ by {difference['gap']:.3g} "
            f"in a plain pass; see docs/exactness.md on rounding in {result['dtype']})"
        )
    return (
        f"\nequal: {equal}\n"
        f"with the head: {result['tokens_per_second']:.1f} tokens/s, plain generate: "
        f"{result['plain_tokens_per_second']:.1f} tokens/s, speed-up {result['speedup']:.2f}x ({result['dtype']})\n"
        f"the same passes without drafts: {result['undrafted_tokens_per_second']:.1f} tokens/s\n"
        f"tau: {result['tau']:.2f} tokens per target pass, {result['rounds']} passes, "
        f"{result['verified_tokens']} tokens verified for {result['new_tokens']} new ones\n"
        f"tiers: {', '.join(f'{name} {count}' for name, count in result['tiers'].items())}; "
        f"passes {result['graphs']}"
    )
