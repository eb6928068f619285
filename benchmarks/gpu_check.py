"""Everything that needs a GPU, in one run: exactness, waits, the arms, and cost curves. Writes JSON; sized for eight
minutes.

    python benchmarks/gpu_check.py --output gpu.json                # on a GPU
    python benchmarks/gpu_check.py --device cpu --tiny --output x   # the script itself, in a minute on any machine

No network and no downloads: the head and target are the shipped ones, and the 8B shape has random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_heterospec import HeteroSpecConfig, HeteroSpecGenerationConfig, HeteroSpecHead
from hf_heterospec.benchmarking import Arm, run_arms, summarise
from hf_heterospec.benchmarking.provenance import describe_run
from hf_heterospec.graphs import graphs_for
from hf_heterospec.measuring import measure_costs
from hf_heterospec.rows import RowStore
from hf_heterospec.targets import load_default_head, load_default_target

LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
SIZES = (1, 2, 4, 8, 16, 32, 60, 100, 200)
PROMPTS = (
    "Write a Python function that checks whether a number is prime.",
    "Explain photosynthesis in three sentences.",
    "A train travels 60 km in 45 minutes. How fast is it?",
    "Summarise the plot of Romeo and Juliet.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=480, help="seconds; parts that would start later are skipped")
    parser.add_argument("--tiny", action="store_true", help="small models and few tokens, to test the script")
    args = parser.parse_args()
    device, started = torch.device(args.device), time.perf_counter()
    result: dict[str, Any] = {"provenance": describe_run(device), "seconds": {}}
    for part in (exactness, waits, arms, costs_small, costs_8b):
        name = part.__name__
        if time.perf_counter() - started > args.budget:
            result[name] = "skipped: the time was up"
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        result[name] = _guarded(part, device, args.tiny)
        result["seconds"][name] = round(time.perf_counter() - start, 1)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["exactness"] and all(row["equal"] for row in result["exactness"]) else 1


def _guarded(part: Callable[..., Any], device: torch.device, tiny: bool) -> Any:
    """One part's result; what it raises is recorded, so that the other parts still run."""
    try:
        return part(device, tiny)
    except (RuntimeError, ValueError, ImportError) as error:
        print(f"{part.__name__} failed: {error!r}", file=sys.stderr)
        return [{"equal": False, "error": repr(error)}]


@torch.inference_mode()
def exactness(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """fp32: eager and compiled trees against plain `generate`, token for token."""
    model, head, prompts = _target_and_head(device, torch.float32, tiny)
    rows = []
    for ids in prompts:
        mask = torch.ones_like(ids)
        plain = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=64)
        for mode in ("never", "always"):
            for depth, nodes, width in ((5, 60, 10), (1, 16, 10), (4, 6, 1)):
                config = HeteroSpecGenerationConfig(
                    do_sample=False, max_new_tokens=64, draft_policy="fixed", draft_depth=depth,
                    draft_total_tokens=nodes, draft_top_k=width, draft_compile=mode,
                )  # fmt: skip
                ours = model.generate(ids, attention_mask=mask, assistant_model=head, generation_config=config)
                equal = ours.shape == plain.shape and bool((ours == plain).all())
                rows.append({"compile": mode, "nodes": nodes, "equal": equal, "tau": head.last_statistics.tau})
    return rows


@torch.inference_mode()
def waits(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """How often a round waits for the device, greedily: once, and once more where a policy looks at drafts."""
    if device.type != "cuda":
        return []  # `tests/test_waits.py` counts for a device that is none
    model, head, prompts = _target_and_head(device, torch.bfloat16, tiny)
    _decide_by_costs_here(model, head)
    rows = []
    for mode in ("never", "always"):
        for policy in ("fixed", "throughput"):
            counts = []
            for num_tokens in (1, 64):
                config = HeteroSpecGenerationConfig(
                    do_sample=False, max_new_tokens=num_tokens, draft_policy=policy, draft_compile=mode
                )
                with _warning_of_waits() as seen:
                    mask = torch.ones_like(prompts[0])
                    model.generate(prompts[0], attention_mask=mask, assistant_model=head, generation_config=config)
                counts.append(sum("synchronizing" in str(warning.message) for warning in seen))
            rounds = head.last_statistics.rounds
            rows.append({"compile": mode, "policy": policy, "waits_per_round": (counts[1] - counts[0]) / rounds})
    return rows


@contextlib.contextmanager
def _warning_of_waits() -> Iterator[list[Any]]:
    """Warnings, one of them each time the host waits for the GPU, as far as torch notices it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")


def arms(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """The arms of `heterospec bench` on a few prompts, bf16."""
    model, head, prompts = _target_and_head(device, torch.float32 if tiny else torch.bfloat16, tiny)
    _decide_by_costs_here(model, head)
    tokenizer = _Ids(prompts)
    trees = ["chain-5", "tree-60-5-10", "tree-60-7-10", "tree-16-1-10"]
    names = ["stock", "plain-compiled", *trees, "paper", "throughput"]
    records = run_arms(
        model,
        tokenizer,  # type: ignore[arg-type]
        head,
        arms=[Arm.parse(name) for name in names],
        prompt_sets={"check": [str(number) for number in range(len(prompts))]},
        max_new_tokens=16 if tiny else 128,
    )
    return [row.to_dict() for row in summarise(records)]


def costs_small(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """Milliseconds of a target pass over N tokens, eager and compiled."""
    model, head, _ = _target_and_head(device, torch.float32 if tiny else torch.bfloat16, tiny)
    return _cost_curve(model, head)


def costs_8b(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """The same for random weights of Llama-3.1-8B's shape, and a random head for it."""
    config = AutoConfig.for_model("llama", **(TINY if tiny else LLAMA_8B))
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if tiny else torch.bfloat16).eval()
        head = _random_head(config)
    return _cost_curve(model, head)


@torch.inference_mode()
def _cost_curve(model: PreTrainedModel, head: HeteroSpecHead, *, context: int = 512, repeats: int = 9) -> list[dict]:
    graphs, status = graphs_for(model, head, "always")
    device, dtype = model.device, model.dtype
    ids = torch.arange(context, device=device)[None] % model.config.vocab_size
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache, use_cache=True)
    store = RowStore.adopt(cache)
    assert graphs is not None, status
    assert store is not None
    rows = []
    for size in SIZES:
        store.reserve(context + size, filled=context)
        tokens, positions = ids[:, :size], torch.arange(context, context + size, device=device)[None]
        mask = torch.zeros(1, 1, size, context + size, dtype=dtype, device=device)
        start, parts = torch.tensor(context, device=device), store.parts()
        kwargs = {"position_ids": positions, "attention_mask": mask, "cache": cache, "use_cache": True}

        def eager(tokens: torch.Tensor = tokens, kwargs: dict[str, Any] = kwargs) -> None:
            store.show(context)
            model(tokens, output_hidden_states=graphs.spec.layer_ids, **kwargs)

        def compiled(inputs: tuple[Any, ...] = (tokens, positions, mask, start, *parts)) -> None:
            graphs.run("target", *inputs)

        times = {name: _milliseconds(run, device, repeats) for name, run in (("eager", eager), ("compiled", compiled))}
        rows.append({"nodes": size, "context": context} | times)
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _milliseconds(run: Callable[[], None], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return round(1000 * statistics.median(times[2:]), 3)


def _target_and_head(
    device: torch.device, dtype: torch.dtype, tiny: bool
) -> tuple[PreTrainedModel, HeteroSpecHead, list[torch.Tensor]]:
    if tiny:
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", initializer_range=0.3, **TINY)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(device)
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        return model, _random_head(config), [torch.arange(2, 9, device=device)[None]]
    model, tokenizer = load_default_target(dtype)
    encode = tokenizer.apply_chat_template
    prompts = [
        encode([{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        for prompt in PROMPTS
    ]
    return model.to(device), load_default_head(), [prompt["input_ids"].to(device) for prompt in prompts]


def _decide_by_costs_here(model: PreTrainedModel, head: HeteroSpecHead) -> None:
    """Give the head's policy, if there is one, what compiled passes cost on this machine."""
    costs = measure_costs(model, head, draft_compile="always", progress=False)
    if head.policy is not None:
        head.policy = head.policy.with_costs({"compiled": costs})


def _random_head(config: Any) -> HeteroSpecHead:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    draft = min(config.vocab_size, 32000)
    return HeteroSpecHead(HeteroSpecConfig(draft_vocab_size=draft, **{name: getattr(config, name) for name in names}))


class _Ids:
    """A tokenizer for `run_arms` whose prompts are numbers of prompts already encoded."""

    chat_template = None

    def __init__(self, prompts: list[torch.Tensor]) -> None:
        self.prompts = prompts

    def __call__(self, prompt: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": self.prompts[int(prompt)]}


if __name__ == "__main__":
    sys.exit(main())
