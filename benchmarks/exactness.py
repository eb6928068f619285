"""Greedy output with the head against plain `generate`: SmolLM2 on 20 prompts of each evaluation set.

    python benchmarks/exactness.py PROMPT_FOLDER --dtype float32

fp32: every token must be plain decoding's. bf16: every token must be the argmax of a plain pass over the same prefix,
or within two bf16 roundings of it; the ties are counted. The folder holds the five sets published with EAGLE, one
JSONL file each (`turns[0]` is the prompt). Resumes where it was stopped; exit code 1 when a token is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from provenance import RESULTS, provenance, write_json
from tqdm import tqdm

from hf_heterospec import HeteroSpecGenerationConfig
from hf_heterospec.exactness import ROUNDINGS_ALLOWED, first_difference, logit_gaps
from hf_heterospec.targets import load_default_head, load_default_target

SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompts", type=int, default=20, help="per set")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--total-tokens", type=int, default=60)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    args = parser.parse_args()
    path = RESULTS / f"exactness-{args.dtype}.json"
    settings = {"depth": args.depth, "total_tokens": args.total_tokens, "max_new_tokens": args.max_new_tokens}
    results = json.loads(path.read_text()) if path.exists() else {"settings": settings, "runs": [], "prompts": {}}
    if results["settings"] != settings:
        parser.error(f"{path} was recorded with {results['settings']}; delete it to record with {settings}")

    model, tokenizer = load_default_target(getattr(torch, args.dtype))
    head = load_default_head()
    config = HeteroSpecGenerationConfig(
        do_sample=False,
        max_new_tokens=args.max_new_tokens,
        draft_policy="fixed",
        draft_depth=args.depth,
        draft_total_tokens=args.total_tokens,
    )
    results["runs"].append(provenance())
    for name in args.sets:
        rows = [json.loads(line) for line in (args.folder / f"{name}.jsonl").read_text().splitlines()]
        for index, row in enumerate(tqdm(rows[: args.prompts], desc=name)):
            if (key := f"{name}/{index}") in results["prompts"]:
                continue
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": row["turns"][0]}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            results["prompts"][key] = compare(model, head, inputs["input_ids"], config)
            results["summary"] = summarise(results["prompts"])
            write_json(path, results)
    print(json.dumps(results["summary"], indent=1))
    wrong = "prompts_equal" if args.dtype == "float32" else "prompts_within_rounding"
    return 0 if results["summary"][wrong] == results["summary"]["prompts"] else 1


def compare(model, head, input_ids: torch.Tensor, config: HeteroSpecGenerationConfig) -> dict:
    """One prompt, decoded both ways."""
    length = input_ids.shape[1]
    plain = model.generate(input_ids, do_sample=False, max_new_tokens=config.max_new_tokens)
    ids = model.generate(input_ids, generation_config=config, assistant_model=head)
    gaps = logit_gaps(model, ids, prompt_length=length)
    difference = first_difference(model, ids, plain, prompt_length=length)
    return {
        "new_tokens": len(gaps.logits),
        "equal": torch.equal(ids, plain),
        "not_argmax": int((gaps.logits > 0).sum()),
        "largest_gap": float(gaps.logits.max()),
        "largest_gap_in_roundings": float(gaps.roundings.max()),
        "first_difference": difference._asdict() if difference else None,
        "tau": head.last_statistics.tau,
    }


def summarise(prompts: dict[str, dict]) -> dict:
    rows = prompts.values()
    return {
        "prompts": len(prompts),
        "prompts_equal": sum(row["equal"] for row in rows),
        "prompts_within_rounding": sum(row["largest_gap_in_roundings"] <= ROUNDINGS_ALLOWED for row in rows),
        "tokens": sum(row["new_tokens"] for row in rows),
        "ties": sum(row["not_argmax"] for row in rows),
        "largest_gap": max(row["largest_gap"] for row in rows),
        "largest_gap_in_roundings": max(row["largest_gap_in_roundings"] for row in rows),
        "mean_tau": sum(row["tau"] for row in rows) / len(prompts),
    }


if __name__ == "__main__":
    sys.exit(main())
