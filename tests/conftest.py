"""Targets and heads for the tests: tiny random ones of many architectures, and the real SmolLM2 with its head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_heterospec import HeteroSpecConfig, HeteroSpecGenerationConfig, HeteroSpecHead
from hf_heterospec.graphs import running
from hf_heterospec.targets import load_default_head, load_default_target

DATA = Path(__file__).parent / "data"
VOCAB, HIDDEN, LAYERS = 16, 32, 4

# What a tiny model of each architecture needs besides the common sizes.
ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "phi3": {},
    "gpt_neox": {},
    "olmo2": {},
    "granite": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
}

# Architectures with layers that keep a state instead of rows.
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
RECURRENT = {
    "qwen3_next": {
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
}


def tiny_target(architecture: str = "llama", *, seed: int = 0, **overrides) -> AutoModelForCausalLM:
    """A random model of four layers. Its weights are large enough that greedy text is not one token for ever."""
    config = AutoConfig.for_model(
        architecture,
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        | (ARCHITECTURES | RECURRENT).get(architecture, {})
        | overrides,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny_head(target: AutoModelForCausalLM, *, seed: int = 0, **overrides) -> HeteroSpecHead:
    """A random head. Its eight best of 16 tokens hold the target's next one every other time."""
    config = target.config
    torch.manual_seed(seed)
    return HeteroSpecHead(
        HeteroSpecConfig(
            **{
                "vocab_size": config.vocab_size,
                "hidden_size": config.hidden_size,
                "intermediate_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "initializer_range": 0.05,
                "target_layer_ids": [1, 2, 3],
                "bos_token_id": config.bos_token_id,
                "eos_token_id": config.eos_token_id,
                "pad_token_id": config.pad_token_id,
            }
            | overrides
        )
    ).eval()


def prompt_of(length: int = 7, *, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    """Random ids, `[1, length]`."""
    return torch.randint(2, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


def draft_config(**kwargs) -> HeteroSpecGenerationConfig:
    """Greedy, 24 new tokens, trees of 40 nodes three expansions deep, unless told otherwise."""
    return HeteroSpecGenerationConfig(
        **{
            "do_sample": False,
            "max_new_tokens": 24,
            "draft_policy": "fixed",
            "draft_depth": 3,
            "draft_top_k": 8,
            "draft_total_tokens": 40,
        }
        | kwargs
    )


@pytest.fixture(autouse=True)
def _no_build_in_the_background(monkeypatch):
    """Tests decide themselves when something is compiled; two cores are too few for a build beside them."""
    monkeypatch.setattr(running, "BUILD_AFTER_SECONDS", float("inf"))


@pytest.fixture
def target():
    return tiny_target()


@pytest.fixture
def head(target):
    return tiny_head(target)


@pytest.fixture(scope="session")
def smollm():
    """SmolLM2-135M-Instruct in fp32, its tokenizer and its head."""
    model, tokenizer = load_default_target(torch.float32)
    return model, tokenizer, load_default_head()


@pytest.fixture(scope="session")
def bench_prompts():
    return [json.loads(line) for line in (DATA / "bench_prompts.jsonl").read_text().splitlines()]


def chat_ids(tokenizer, prompt: str) -> torch.Tensor:
    """The chat template's ids of one user message, `[1, length]`."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
