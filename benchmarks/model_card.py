"""Write the shipped head's model card from recorded results.

    python benchmarks/model_card.py

Reads the head's config and policy, `results/training.json` (written by `heterospec train-head`) and
`results/acceptance-*.json` (`benchmarks/acceptance.py`). A test compares the card with what this script makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
REPOSITORY = ROOT / "hub_assets" / "SmolLM2-135M-Instruct-heterospec"
SETS = {"mt_bench": "MT-Bench", "humaneval": "HumanEval", "gsm8k": "GSM8K", "alpaca": "Alpaca", "cnn_dm": "CNN/DM"}

CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: transformers
tags: [eagle3, speculative-decoding, heterospec]
---
# EAGLE-3 head and policy for SmolLM2-135M-Instruct

```python
from hf_heterospec import HeteroSpecHead

head = HeteroSpecHead.from_pretrained("{name}")
model.generate(**inputs, assistant_model=head)
```

SafeAILab's layout, bf16, {parameters:.1f} M parameters, draft vocabulary {vocabulary}, features from hidden states
{layers}, feedback before the norm. `policy.json` chooses each round's tree; it was fitted on {positions} positions of
{policy_answers} of the target's answers. Use the chat template with its default system prompt: the head has seen no
other.

## Acceptance

Tokens per target pass (tau), greedy, EAGLE's tree of {num_nodes} nodes with a beam of {top_k}, prompts of the sets
published with EAGLE, at most {max_new_tokens} new tokens:

{acceptance}

Share of rounds whose accepted branch reaches a level of the tree (depth 7, {first_dtype}):

{levels}

## Training

{answers} answers of the target itself, {answer_tokens:.1f} M tokens, greedy, to prompts with these licences:

{licences}

Sources: {sources}.

No prompt overlaps with a prompt of the five sets above, which serve evaluation only: equal prompts, prompts that share
13 words in a row with one, and prompts half of whose 8-word runs occur there were left out ({overlapping} were).

Recipe: {recipe}

## Limits

One target: SmolLM2-135M-Instruct; with other weights drafts are rejected, though the output stays right. English.
Tokens outside the draft vocabulary cannot be drafted: names in long texts end accepted runs, one reason why CNN/DM has
the lowest acceptance.
"""


def main() -> None:
    (REPOSITORY / "README.md").write_text(render())


def render() -> str:
    """The card's text."""
    config, policy = read(REPOSITORY / "config.json"), read(REPOSITORY / "policy.json")
    training = read(RESULTS / "training.json")
    acceptance = {path.stem.removeprefix("acceptance-"): read(path) for path in sorted(RESULTS.glob("acceptance-*"))}
    first_dtype, first = next(iter(acceptance.items()))
    corpus = training["corpus"]
    return CARD.format(
        name=REPOSITORY.name,
        parameters=training["parameters"] / 1e6,
        vocabulary=config["draft_vocab_size"],
        layers="2, 15 and 27" if config["target_layer_ids"] is None else config["target_layer_ids"],
        positions=policy["provenance"]["positions"],
        policy_answers=policy["provenance"]["answers"],
        **{key: first["settings"][key] for key in ("num_nodes", "top_k", "max_new_tokens")},
        acceptance=acceptance_table(acceptance),
        first_dtype=first_dtype,
        levels=level_table(first),
        answers=corpus["answers"],
        answer_tokens=corpus["answer_tokens"] / 1e6,
        licences="\n".join(f"* {licence}: {count}" for licence, count in corpus["licences"].items()),
        sources=", ".join(f"{source} ({count})" for source, count in corpus["sources"].items()),
        overlapping=corpus["left_out_as_overlapping"],
        recipe=training["recipe"],
    )


def acceptance_table(acceptance: dict[str, Any]) -> str:
    arms = [
        f"{dtype}, {results['settings']['prompts']} prompts, depth {depth}"
        for dtype, results in acceptance.items()
        for depth in (5, 7)
    ]
    rows = ["| set | " + " | ".join(arms) + " |"]
    rows.append("|---" * (1 + len(arms)) + "|")
    for key, title in SETS.items():
        taus = [results["sets"][key][f"depth_{depth}"]["tau"] for results in acceptance.values() for depth in (5, 7)]
        rows.append(f"| {title} | " + " | ".join(f"{tau:.2f}" for tau in taus) + " |")
    means = [results["mean_tau"][depth] for results in acceptance.values() for depth in ("5", "7")]
    rows.append("| mean | " + " | ".join(f"{tau:.2f}" for tau in means) + " |")
    return "\n".join(rows)


def level_table(results: dict[str, Any]) -> str:
    rows = ["| set | " + " | ".join(map(str, range(1, 9))) + " |", "|---" * 9 + "|"]
    for key, title in SETS.items():
        shares = results["sets"][key]["depth_7"]["accepted_to_level"]
        rows.append(f"| {title} | " + " | ".join(f"{share:.2f}" for share in shares) + " |")
    return "\n".join(rows)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
