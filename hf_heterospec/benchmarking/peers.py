"""Decoders of other libraries, as arms on the same target, head and prompts."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..head import HeteroSpecHead


def has_economize() -> bool:
    return importlib.util.find_spec("economize") is not None


class EconomizeChain:
    """The EAGLE-3 chain of https://github.com/Thiggel/economize (0.3.2), with a head of ours.

    The head goes there through the published EAGLE-3 layout and computes in the target's dtype, as it does here; on a
    GPU the passes are replayed from CUDA graphs. The target itself is left as it is.
    """

    def __init__(self, model: PreTrainedModel, head: HeteroSpecHead) -> None:
        import economize

        with tempfile.TemporaryDirectory() as folder:
            head.save_pretrained(folder)
            path = Path(folder) / "config.json"
            layers = {"eagle_aux_hidden_state_layer_ids": head.layers_of(model)}
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eagle_config": layers}))
            checkpoint: Any = economize.read_checkpoint(folder, format="eagle3")
        checkpoint.configs = [dataclasses.replace(checkpoint.configs[0], param_dtype="model")]
        self.model = economize.attach(model, checkpoint)
        self.stop = getattr(model.generation_config, "eos_token_id", None)

    def decode(self, ids: Tensor, *, num_levels: int, max_new_tokens: int) -> tuple[int, dict[str, Any]]:
        """Greedily after `ids` (`[1, length]`): the number of new tokens, and what a `Record` tells of the rounds."""
        import economize

        decoding = economize.DecodeConfig(cycle_length=num_levels + 1, cuda_graphs=ids.device.type == "cuda")
        result = self.model.decode(ids, max_new_tokens, decoding=decoding, stop=self.stop)
        return result.tokens.numel(), {
            "rounds": len(result.acceptance),
            "verified_tokens": sum(drafted + 1 for drafted, _ in result.acceptance),
            "tau": 1 + result.mean_accepted,
            "graphs": "economize: CUDA graphs" if decoding.cuda_graphs else "economize: eager",
        }
