"""What `hub_assets` holds: a head that drafts as well as recorded, and a card that says what was measured."""

from __future__ import annotations

import runpy
from pathlib import Path

from conftest import chat_ids

from hf_heterospec import HeteroSpecGenerationConfig

ROOT = Path(__file__).resolve().parent.parent
FLOOR = 2.9  # tokens per target pass over the 15 prompts below


def test_the_shipped_head_keeps_its_acceptance(smollm, bench_prompts):
    model, tokenizer, head = smollm
    config = HeteroSpecGenerationConfig(
        do_sample=False, max_new_tokens=48, draft_policy="fixed", draft_depth=5, draft_total_tokens=60
    )
    accepted = rounds = 0
    for row in bench_prompts:
        model.generate(chat_ids(tokenizer, row["prompt"]), generation_config=config, assistant_model=head)
        accepted += head.last_statistics.accepted_tokens
        rounds += head.last_statistics.rounds
    assert 1 + accepted / rounds > FLOOR


def test_the_model_card_says_what_was_recorded():
    card = runpy.run_path(str(ROOT / "benchmarks" / "model_card.py"))
    assert (card["REPOSITORY"] / "README.md").read_text() == card["render"]()
