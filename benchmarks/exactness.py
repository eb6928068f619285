"""Greedy output with the head against plain `generate`: SmolLM2 on 20 prompts of each evaluation set.

    python benchmarks/exactness.py PROMPT_FOLDER --dtype float32

fp32: every token must be plain decoding's. bf16: every token must be the argmax of a plain pass over the same prefix,
or within two bf16 roundings of it; what plain decoding's own output gives in the same check stands beside it. The
folder holds the five sets published with EAGLE, one JSONL file each (`turns[0]` is the prompt). Resumes where it was
stopped; exit code 1 when a token is wrong.
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
from hf_heterospec.exactness import ROUNDINGS_ALLOWED, Gaps, first_difference, logit_gaps
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
    exact = results["summary"]["prompts_equal"] == results["summary"]["prompts"]
    within_rounding = results["summary"]["gaps"]["beyond_rounding"] == 0
    return 0 if (exact if args.dtype == "float32" else within_rounding) else 1


def compare(model, head, input_ids: torch.Tensor, config: HeteroSpecGenerationConfig) -> dict:
    """One prompt, decoded both ways."""
    length = input_ids.shape[1]
    plain = model.generate(input_ids, do_sample=False, max_new_tokens=config.max_new_tokens)
    ids = model.generate(input_ids, generation_config=config, assistant_model=head)
    gaps, plain_gaps = (logit_gaps(model, text, prompt_length=length) for text in (ids, plain))
    difference = first_difference(model, ids, plain, prompt_length=length)
    return {
        "new_tokens": len(gaps.logits),
        "equal": torch.equal(ids, plain),
        "gaps": describe(gaps),
        "plain_gaps": describe(plain_gaps),
        "first_difference": difference._asdict() if difference else None,
        "tau": head.last_statistics.tau,
    }


def describe(gaps: Gaps) -> dict:
    return {
        "not_argmax": int((gaps.logits > 0).sum()),
        "beyond_rounding": int((gaps.roundings > ROUNDINGS_ALLOWED).sum()),
        "largest": float(gaps.logits.max()),
        "largest_in_roundings": float(gaps.roundings.max()),
    }


def summarise(prompts: dict[str, dict]) -> dict:
    rows = prompts.values()
    gaps = {
        name: {
            "ties": sum(row[name]["not_argmax"] for row in rows),
            "beyond_rounding": sum(row[name]["beyond_rounding"] for row in rows),
            "largest": max(row[name]["largest"] for row in rows),
            "largest_in_roundings": max(row[name]["largest_in_roundings"] for row in rows),
        }
        for name in ("gaps", "plain_gaps")
    }
    return {
        "prompts": len(prompts),
        "prompts_equal": sum(row["equal"] for row in rows),
        "tokens": sum(row["new_tokens"] for row in rows),
        "mean_tau": sum(row["tau"] for row in rows) / len(prompts),
        **gaps,
    }


if __name__ == "__main__":
    sys.exit(main())
