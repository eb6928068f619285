"""Acceptance length tau of the shipped head under EAGLE's own tree, on the five sets published with EAGLE.

    python benchmarks/acceptance.py PROMPT_FOLDER --dtype bfloat16 --head hub_assets/SmolLM2-135M-Instruct-heterospec

tau is the number of tokens per target pass of greedy decoding with the tree of 60 nodes, beam 10, depth 5 or 7 (one
level more than that, as EAGLE counts). Greedy decoding with a head follows the target's own greedy answer, so that
answer tells what every round accepts: answers are generated many at a time, then the head drafts at each position that
a round starts from, by the code that drafts in `generate`. The first prompt of each set is decoded by `generate` as
well; in fp32 the two must have the same number of rounds. Resumes where it was stopped.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from exactness import SETS
from provenance import RESULTS, provenance, write_json
from tqdm import tqdm

from hf_heterospec import HeteroSpecGenerationConfig, HeteroSpecHead
from hf_heterospec.beam import Level
from hf_heterospec.configuration import DraftSettings
from hf_heterospec.targets import load_default_target
from hf_heterospec.traces import KnownText
from hf_heterospec.training.answering import CorpusGenerator, CorpusSettings
from hf_heterospec.training.corpus import tokenize
from hf_heterospec.tree import DraftTree

DEPTHS = (5, 7)
NUM_NODES, TOP_K = 60, 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--head", default="hub_assets/SmolLM2-135M-Instruct-heterospec")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--prompts", type=int, default=80, help="per set")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--answers", type=Path, help="folder that keeps the answers, for the next head to be measured")
    parser.add_argument("--only-answers", action="store_true", help="fill that folder and stop")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    path = args.out or RESULTS / f"acceptance-{args.dtype}.json"
    settings = {"num_nodes": NUM_NODES, "top_k": TOP_K, "max_new_tokens": args.max_new_tokens, "prompts": args.prompts}
    results = json.loads(path.read_text()) if path.exists() else {"settings": settings, "runs": [], "sets": {}}
    if results["settings"] != settings:
        parser.error(f"{path} was recorded with {results['settings']}; delete it to record with {settings}")
    model, tokenizer = load_default_target(getattr(torch, args.dtype))
    head = HeteroSpecHead.from_pretrained(args.head)
    results["runs"].append(provenance())
    for name in args.sets:
        if name in results["sets"]:
            continue
        texts = answer(model, tokenizer, args.folder / f"{name}.jsonl", args)
        if args.only_answers:
            continue
        results["sets"][name] = measure_set(model, head, texts, name, args.max_new_tokens)
        check_against_generate(model, head, *texts[0], results["sets"][name], args.max_new_tokens)
        results["mean_tau"] = {
            str(depth): sum(row[f"depth_{depth}"]["tau"] for row in results["sets"].values()) / len(results["sets"])
            for depth in DEPTHS
        }
        write_json(path, results)
    print(json.dumps({"mean_tau": results["mean_tau"]} | results["sets"], indent=1))
    return 0


def answer(model, tokenizer, file: Path, args: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, greedy answer ids) of the set, in its order."""
    kept = args.answers / f"{args.dtype}-{args.max_new_tokens}-{file.name}" if args.answers else None
    if kept is not None and kept.exists():
        lines = [json.loads(line) for line in kept.read_text().splitlines()]
        if len(lines) >= args.prompts:
            return [(line["prompt_ids"], line["response_ids"]) for line in lines[: args.prompts]]
    rows = [json.loads(line) for line in file.read_text().splitlines()][: args.prompts]
    settings = CorpusSettings(max_new_tokens=args.max_new_tokens, max_prompt_tokens=4096, max_repeated_tokens=10**6)
    named = [(f"{index:04d}", {"prompt": row["turns"][0]}) for index, row in enumerate(rows)]
    prompts = list(tokenize(named, tokenizer, settings))
    generator = CorpusGenerator(
        model,
        settings=settings,
        longest_prompt=max(len(prompt.ids) for prompt in prompts),
        eos_ids={model.generation_config.eos_token_id},
    )
    done = {}
    for row in tqdm(generator.run(prompts), total=len(prompts), desc=f"{file.stem}: answers"):
        done[row.prompt.id] = (row.prompt.ids, row.response_ids)
    texts = [done[key] for key in sorted(done)]
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"source": file.stem, "prompt_ids": prompt, "response_ids": reply} for prompt, reply in texts]
        kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return texts


@torch.inference_mode()
def measure_set(model, head, texts: list[tuple[list[int], list[int]]], name: str, max_new_tokens: int) -> dict:
    """Rounds, tokens and acceptance per depth, of all answers of a set together; the first answer's rounds apart."""
    settings = DraftSettings(top_k=TOP_K, total_tokens=NUM_NODES, compile="always")
    tallies = {depth: {"rounds": 0, "tokens": 0, "reached": [0] * (depth + 1), "first": 0} for depth in DEPTHS}
    for number, (prompt, reply) in enumerate(tqdm(texts, desc=f"{name}: drafts")):
        ids = torch.tensor([prompt + reply])
        text = KnownText(model, head, ids, settings=settings)
        levels_at = functools.cache(functools.partial(text.draft_at, num_levels=max(DEPTHS) + 1))
        for depth, tally in tallies.items():
            root, end = len(prompt), ids.shape[1]
            while root < end - 1:
                num_levels = min(depth + 1, len(prompt) + max_new_tokens - 2 - root)  # what `generate` has room for
                tree = tree_of(levels_at, root, ids[0, root : root + 1], num_levels)
                accepted = follow(tree, ids[0, root + 1 :].tolist())
                emitted = min(accepted + 1, end - 1 - root)
                tally["rounds"] += 1
                tally["tokens"] += emitted
                for level in range(accepted):
                    tally["reached"][level] += 1
                root += emitted
            if number == 0:
                tally["first"] = tally["rounds"]
    return {
        f"depth_{depth}": {
            "tau": tally["tokens"] / tally["rounds"],
            "rounds": tally["rounds"],
            "tokens": tally["tokens"],
            "accepted_to_level": [round(count / tally["rounds"], 4) for count in tally["reached"]],
            "rounds_of_first_prompt": tally["first"],
        }
        for depth, tally in tallies.items()
    }


def tree_of(levels_at: Callable[[int], list[Level]], root: int, token: torch.Tensor, num_levels: int) -> DraftTree:
    """EAGLE's tree under `token`; near the length limit it is shallower, as in `generate`."""
    if num_levels < 1:
        return DraftTree.root_only(token)
    return DraftTree.best_of(token, [level.candidates for level in levels_at(root)[:num_levels]], NUM_NODES)


def follow(tree: DraftTree, continuation: list[int]) -> int:
    """How many tokens of `continuation` a branch of the tree has."""
    children = {}
    for node, (token, parent) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
        if node:
            children[parent, token] = node
    node = accepted = 0
    for token in continuation:
        if (node := children.get((node, token), -1)) < 0:
            break
        accepted += 1
    return accepted


def check_against_generate(model, head, prompt, reply, measured: dict, max_new_tokens: int) -> None:
    """Decode the first prompt with the head itself. In fp32 the same text must come in the same rounds."""
    for depth in DEPTHS:
        config = HeteroSpecGenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            draft_policy="fixed",
            draft_depth=depth,
            draft_total_tokens=NUM_NODES,
            draft_top_k=TOP_K,
            draft_compile="never",
        )
        ids = model.generate(torch.tensor([prompt]), generation_config=config, assistant_model=head)
        row = measured[f"depth_{depth}"]
        row["generate_gives_the_same_text"] = ids[0, len(prompt) :].tolist() == reply
        row["rounds_of_first_prompt_by_generate"] = head.last_statistics.rounds
        # In half precision features differ by rounding, and so may a draft.
        comparable = row["generate_gives_the_same_text"] and model.dtype == torch.float32
        if comparable and head.last_statistics.rounds != row["rounds_of_first_prompt"]:
            raise RuntimeError(f"generate took {head.last_statistics.rounds} rounds, the replay another number: {row}")


if __name__ == "__main__":
    sys.exit(main())
