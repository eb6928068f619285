"""The commands `heterospec trace` and `heterospec fit-policy`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..machine import AUTO, DTYPES, resolve_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..head import HeteroSpecHead
    from ..traces import TracedAnswer, Traces
    from .costs import Costs


def add_parsers(subparsers: Any) -> None:
    """Add both commands to the command line."""
    trace = subparsers.add_parser("trace", help="record what a head drafts along the target's own answers")
    _add_models(trace)
    _add_texts(trace)
    trace.add_argument("--out", type=Path, required=True, help="the trace file to write (safetensors)")
    trace.set_defaults(run=run_trace)

    fit = subparsers.add_parser("fit-policy", help="fit a draft policy from prompts, answers or traces")
    _add_models(fit)
    _add_texts(fit)
    fit.add_argument("--traces", type=Path, nargs="+", help="trace files, instead of prompts or answers")
    fit.add_argument("--evaluate", type=Path, nargs="+", help="trace files of other prompts, for the report's tables")
    fit.add_argument("--out", type=Path, required=True, help="folder for policy.json, a head's repository for one")
    fit.add_argument("--report", type=Path, help="folder for pictures and index.html (needs matplotlib)")
    fit.add_argument("--depth", type=int, default=5, help="of the paper's base tree")
    fit.add_argument("--total-tokens", type=int, default=60, help="nodes of the paper's base tree, the root included")
    fit.add_argument("--costs", type=Path, help="a JSON file to take the costs from, instead of measuring them")
    fit.add_argument("--only-costs", action="store_true", help="measure costs here and put them into OUT/policy.json")
    fit.add_argument("--head-repo", help="where the head lives, if not beside the policy: repository id[@revision]")
    fit.set_defaults(run=run_fit)


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help="folder or repository of the target (default: the embedded SmolLM2)")
    parser.add_argument("--head", help="folder or repository of the head (default: the shipped one)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=AUTO)
    parser.add_argument("--device", default="cpu")


def _add_texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, nargs="+", help="JSONL with `prompt` or `turns`; the target answers")
    parser.add_argument("--answers", type=Path, nargs="+", help="JSONL with prompt_ids and response_ids, greedy")
    parser.add_argument("--limit", type=int, help="texts per file")
    parser.add_argument("--max-new-tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--levels", type=int, default=9, help="levels to draft at each position")
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument(
        "--compile", choices=("always", "never"), default="never", help="of the head's passes while tracing"
    )


def run_trace(args: argparse.Namespace) -> int:
    """Trace, each process its share of the texts; with several, each writes a file of its own."""
    from accelerate import PartialState

    state = PartialState(cpu=args.device == "cpu")
    model, tokenizer, head = load_models(args)
    traces = collect_traces(args, model, tokenizer, head, share=(state.process_index, state.num_processes))
    out = args.out
    if state.num_processes > 1:
        out = out.with_name(f"{out.stem}-{state.process_index:05d}-of-{state.num_processes:05d}{out.suffix}")
    out.parent.mkdir(parents=True, exist_ok=True)
    traces.save(out)
    print(f"{out}: {len(traces)} positions of {len(traces.sources)} answers", file=sys.stderr)
    return 0


def run_fit(args: argparse.Namespace) -> int:
    """Fit, write the policy, and print what it is expected to bring."""
    from ..traces import Traces
    from .fitting import compare, fit_policy
    from .repository import HeadReference, StratificationPolicy
    from .simulation import Simulator

    if args.only_costs:
        model, _, head = load_models(args)
        policy = StratificationPolicy.from_pretrained(args.out).with_costs(_costs(args, model, head))
        policy.save_pretrained(args.out)
        return 0
    needs_models = args.traces is None or args.costs is None
    model, tokenizer, head = load_models(args) if needs_models else (None, None, None)  # type: ignore[assignment]
    if args.traces is not None:
        traces = Traces.load(*args.traces)
    else:
        traces = collect_traces(args, model, tokenizer, head)
    fingerprint = _fingerprint(traces, head)
    repo_id, _, revision = (args.head_repo or "").partition("@")
    policy = fit_policy(
        traces,
        _costs(args, model, head),
        head=HeadReference(fingerprint, repo_id or None, revision or None),
        depth=args.depth,
        num_nodes=args.total_tokens,
    )
    policy.save_pretrained(args.out)
    judged = Simulator(Traces.load(*args.evaluate) if args.evaluate else traces)
    arms = compare(judged, policy)
    for name, arm in arms.items():
        print(
            f"{name:40s} {arm.speedup:5.2f}x plain  tau {arm.tau:4.2f}  {arm.rounds} target calls  "
            f"{arm.verified_tokens} verified  {arm.tokens_per_second:.1f} tokens/s (simulated)"
        )
    if args.report:
        from .report import write_report

        write_report(args.report, policy, Simulator(traces), judged, arms)
    print(f"{args.out}/policy.json written", file=sys.stderr)
    return 0


def load_models(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, HeteroSpecHead]:
    """Target, tokenizer and head of the command line."""
    import torch

    from ..targets import load_pair

    args.dtype = resolve_dtype(args.dtype, args.device)
    return load_pair(args.target, args.head, dtype=getattr(torch, args.dtype), device=args.device)


def collect_traces(
    args: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    head: HeteroSpecHead,
    *,
    share: tuple[int, int] = (0, 1),
) -> Traces:
    """Traces of the texts of the command line: those of number `share[0]` modulo `share[1]`."""
    from ..traces import collect

    if args.prompts is None and args.answers is None:
        raise ValueError("Nothing to trace; got neither --prompts nor --answers. Give one of them, or --traces.")
    if args.answers is not None:
        answers = _read_answers(args)[share[0] :: share[1]]
    else:
        answers = _answer_prompts(args, model, tokenizer, head, share)
    metadata = {
        "target": str(args.target or getattr(model.config, "_name_or_path", "")).rsplit("/", 1)[-1],
        "dtype": args.dtype,
        "fingerprint": head.fingerprint(),
    }
    return collect(
        model, head, answers, num_levels=args.levels, top_k=args.top_k, compile=args.compile, metadata=metadata
    )


def _read_answers(args: argparse.Namespace) -> list[TracedAnswer]:
    from ..traces import TracedAnswer
    from ..training.answers import read_jsonl

    return [
        TracedAnswer(row["prompt_ids"], row["response_ids"][: args.max_new_tokens], row.get("source", path.stem))
        for path in args.answers
        for row, _ in zip(read_jsonl(path), range(args.limit or sys.maxsize), strict=False)
    ]


def _answer_prompts(
    args: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    head: HeteroSpecHead,
    share: tuple[int, int],
) -> list[TracedAnswer]:
    import torch
    from tqdm.auto import tqdm

    from ..configuration import HeteroSpecGenerationConfig
    from ..traces import TracedAnswer
    from ..training.answers import read_jsonl

    prompts = [
        (path.name.split(".")[0], row["prompt"] if "prompt" in row else row["turns"][0])
        for path in args.prompts
        for row, _ in zip(read_jsonl(path), range(args.limit or sys.maxsize), strict=False)
    ][share[0] :: share[1]]
    generation_config = HeteroSpecGenerationConfig(
        draft_policy="fixed", draft_depth=1, draft_total_tokens=8, do_sample=False, max_new_tokens=args.max_new_tokens
    )
    answers = []
    for source, prompt in tqdm(prompts, desc="answering", unit="prompt"):
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        with torch.inference_mode():
            ids = model.generate(**inputs, assistant_model=head, generation_config=generation_config)[0].tolist()
        length = inputs["input_ids"].shape[1]
        answers.append(TracedAnswer(ids[:length], ids[length:], source))
    return answers


def _costs(args: argparse.Namespace, model: Any, head: Any) -> Mapping[str, Costs]:
    from ..measuring import measure_all_costs
    from .costs import read_costs

    return read_costs(args.costs) if args.costs is not None else measure_all_costs(model, head)


def _fingerprint(traces: Traces, head: HeteroSpecHead | None) -> str:
    traced = traces.metadata.get("fingerprint")
    ours = head.fingerprint() if head is not None else traced
    if ours is None or traced not in (None, ours):
        raise ValueError(
            f"The traces are of a head with fingerprint {traced}; this head's is {ours}. Trace again with this head."
        )
    return ours
