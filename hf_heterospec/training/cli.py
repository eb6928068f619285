"""The commands `heterospec corpus` and `heterospec train-head`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..head import HeteroSpecHead
from ..machine import AUTO, DTYPES, resolve_dtype
from ..targets import load_default_target
from .answering import CorpusSettings
from .answers import Answer, describe_corpus, read_answers
from .corpus import generate_corpus
from .overlap import BenchmarkFilter
from .store import TOP_K, FeatureStore, split_answers
from .trainer import HeadTrainer, TrainSettings
from .vocabulary import coverage, draft_vocabulary, new_head, with_vocabulary

DRAFT_VOCAB = 16384  # tokens that a new head can propose

HELP = {
    "rows": "answers decoded together",
    "max_new_tokens": "an answer that has not ended by then is cut",
    "max_prompt_tokens": "longer prompts are left out",
    "max_repeated_tokens": "an answer is cut when so many tokens in a row repeat what it already said",
    "temperature": "0: most likely tokens; above: tokens drawn at this temperature",
    "system": "system prompt; left to the chat template when not given",
    "shard_size": "answers per file",
    "epochs": "passes over the corpus; may be a fraction",
    "batch_size": "answers per step and process",
    "learning_rate": "of AdamW, before the decay",
    "warmup_steps": "steps over which the learning rate rises",
    "decay": "share of the run, at its end, in which the learning rate falls to zero",
    "weight_decay": "of AdamW, on matrices",
    "clip": "largest gradient norm",
    "steps": "tokens a chain drafts in training",
    "fraction": "share of an answer's positions that start a chain each time it is seen",
    "step_decay": "share of the chains that go on to their next step",
    "checkpoint_every": "steps between checkpoints and evaluations",
    "log_every": "steps per line of log.jsonl",
    "seed": "of everything random",
    "dtype": "of the head's products: bfloat16 or float32, or auto: bfloat16 where the machine multiplies it",
}
DEFAULTS = {"dtype": "auto"}  # where the command line's differ from the settings'
OPTIONAL_TYPES: dict[str, type] = {"system": str}


def add_parsers(subparsers: Any) -> None:
    """Add `corpus` and `train-head` to an argparse subparsers object; each sets `run`, a function of the namespace."""
    corpus = subparsers.add_parser("corpus", help="let a target answer prompts: what its head is trained on")
    _target_arguments(corpus)
    corpus.add_argument("--prompts", nargs="+", type=Path, required=True, help="JSONL(.gz) files with a `prompt`")
    corpus.add_argument("--exclude", nargs="*", type=Path, default=[], help="benchmark files no prompt may overlap")
    corpus.add_argument("--out", type=Path, required=True, help="folder; answers that it holds are not made again")
    corpus.add_argument("--limit", type=int, help="answer the first so many prompts only")
    _settings_arguments(corpus, CorpusSettings)
    corpus.set_defaults(run=run_corpus)

    train = subparsers.add_parser("train-head", help="train a head on a corpus of its target's answers")
    _target_arguments(train)
    train.add_argument("--corpus", nargs="+", type=Path, required=True, help="folders or files with answers")
    train.add_argument("--exclude", nargs="*", type=Path, default=[], help="benchmark files no prompt may overlap")
    train.add_argument("--out", type=Path, required=True, help="folder of the head; a run there is resumed")
    train.add_argument("--features", type=Path, help="folder for the target's features (default: OUT/features)")
    train.add_argument("--init", help="head to start from: folder or Hub repository (default: the target's last layer)")
    train.add_argument(
        "--draft-vocab",
        type=int,
        help=f"tokens that the head can propose (default: those of --init, {DRAFT_VOCAB} for a new head)",
    )
    train.add_argument("--held-out", type=int, default=100, help="answers kept for evaluation")
    _settings_arguments(train, TrainSettings)
    train.set_defaults(run=run_train_head)


def run_corpus(args: argparse.Namespace) -> int:
    settings = _settings(args, CorpusSettings)
    args.target_dtype = resolve_dtype(args.target_dtype, "cpu")
    target, tokenizer = load_target(args.target, dtype=args.target_dtype)
    out = generate_corpus(
        target,
        tokenizer,
        args.prompts,
        out=args.out,
        settings=settings,
        exclude=BenchmarkFilter.from_files(args.exclude),
        limit=args.limit,
    )
    print(f"{len(read_answers(corpus_files([out])))} answers in {out}")
    return 0


def run_train_head(args: argparse.Namespace) -> int:
    device = PartialState().device
    args.dtype, args.target_dtype = resolve_dtype(args.dtype, device), resolve_dtype(args.target_dtype, device)
    settings = _settings(args, TrainSettings)
    accelerator = Accelerator(mixed_precision="bf16" if settings.dtype == "bfloat16" else "no")
    target, _ = load_target(args.target, dtype=args.target_dtype)
    target.to(accelerator.device)
    everything = read_answers(corpus_files(args.corpus))
    benchmark = BenchmarkFilter.from_files(args.exclude)
    answers = [answer for answer in everything if not benchmark.overlaps(answer.prompt)]
    accelerator.print(f"{len(answers)} answers; {len(everything) - len(answers)} overlap with a benchmark")
    split = split_answers(answers, held_out=args.held_out, seed=settings.seed)
    head = starting_head(args, target, split.train)
    known = head.draft_to_target(torch.arange(head.config.draft_vocab_size))
    accelerator.print(f"draft vocabulary: {coverage(split.held_out, known):.1%} of held-out answer tokens")
    layers = head.layers_of(target)
    store = FeatureStore(
        args.features or args.out / "features",
        answers,
        held_out=args.held_out,
        seed=settings.seed,
        description={"target": args.target, "dtype": args.target_dtype, "layers": layers, "top_k": TOP_K},
    )
    store.extract(target, layers=layers, accelerator=accelerator)
    embed = target.get_input_embeddings().requires_grad_(False)
    del target
    trainer = HeadTrainer(
        head.to(accelerator.device),
        embed=embed,
        store=store,
        settings=settings,
        out=args.out,
        accelerator=accelerator,
    )
    trainer.train()
    if accelerator.is_main_process:
        record = {
            "target": args.target,
            "started_from": args.init or "the target's last layer",
            "corpus": describe_corpus(answers) | {"left_out_as_overlapping": len(everything) - len(answers)},
            "draft_vocabulary": head.config.draft_vocab_size,
            "settings": asdict(settings),
            **trainer.progress,
        }
        (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    accelerator.print(f"head in {args.out} (best tau of held-out chains: {trainer.progress['best_tau']:.3f})")
    return 0


def starting_head(args: argparse.Namespace, target: PreTrainedModel, answers: Sequence[Answer]) -> HeteroSpecHead:
    """The head of `--init`, with a larger vocabulary if `--draft-vocab` asks for one, or a new one."""
    text = target.config.get_text_config(decoder=True)
    if args.init is None:
        eos = target.generation_config.eos_token_id
        size = min(args.draft_vocab or DRAFT_VOCAB, text.vocab_size)
        always = [eos] if isinstance(eos, int) else eos or []
        return new_head(target, draft_vocabulary(answers, size=size, vocab_size=text.vocab_size, always=always))
    head = HeteroSpecHead.from_pretrained(args.init)
    if args.draft_vocab in (None, head.config.draft_vocab_size):
        return head
    if args.draft_vocab < head.config.draft_vocab_size:
        raise ValueError(
            f"--draft-vocab must be at least the {head.config.draft_vocab_size} tokens of {args.init}; got "
            f"{args.draft_vocab}. Leave it out to keep them."
        )
    known = head.draft_to_target(torch.arange(head.config.draft_vocab_size)).tolist()
    vocabulary = draft_vocabulary(answers, size=args.draft_vocab, vocab_size=text.vocab_size, always=known)
    return with_vocabulary(head, vocabulary, target.get_output_embeddings().weight.detach().cpu())


def load_target(name: str, *, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`default` is the embedded SmolLM2; everything else is a folder or a Hub repository."""
    if name == "default":
        return load_default_target(getattr(torch, dtype))
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    return model.eval(), AutoTokenizer.from_pretrained(name)


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """The JSONL files among `paths` and in the folders among them.

    Raises:
        ValueError: naming a path that holds none.
    """
    files: list[Path] = []
    for path in paths:
        found = sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")]) if path.is_dir() else [path]
        if not found or not all(file.exists() for file in found):
            raise ValueError(f"{path} must be a JSONL(.gz) file or a folder with some; found none. Check the path.")
        files += found
    return files


def _target_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default="default", help="folder or Hub repository; `default`: the embedded SmolLM2")
    parser.add_argument(
        "--target-dtype",
        choices=DTYPES,
        default="auto",
        help=AUTO,
    )


def _settings_arguments(parser: argparse.ArgumentParser, settings: type) -> None:
    for item in fields(settings):
        flag = "--" + item.name.replace("_", "-")
        kind = OPTIONAL_TYPES.get(item.name) or type(item.default)
        default = DEFAULTS.get(item.name, item.default)
        parser.add_argument(flag, type=kind, default=default, help=f"{HELP[item.name]} (default: %(default)s)")


def _settings(args: argparse.Namespace, settings: type) -> Any:
    return settings(**{item.name: getattr(args, item.name) for item in fields(settings)})
