"""The one seam into transformers: `generate(..., assistant_model=head)` reaches our loop.

`generate` looks `_assisted_decoding` up on the model's class, so wrapping it once on `GenerationMixin` serves every
model, pipelines included, and calls the original for everything that is not a `HeteroSpecHead`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import transformers
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from .configuration import DraftSettings
from .decoding import decode
from .head import HeteroSpecHead

# Upstream's methods that are wrapped, with the parameters they are known to have.
KNOWN_PARAMETERS = {
    "_assisted_decoding": (
        "self input_ids logits_processor stopping_criteria generation_config synced_gpus streamer inputs_tensor "
        "assistant_model assistant_tokenizer tokenizer model_kwargs"
    ).split(),
    "_validate_generation_mode": "self generation_mode generation_config generation_mode_kwargs".split(),
}


def install() -> None:
    """Wrap upstream's methods. Does nothing when they are wrapped already.

    Raises:
        ImportError: when the installed transformers has other methods than the ones this was written for.
    """
    for name, wrapper in (
        ("_assisted_decoding", _wrap_assisted_decoding),
        ("_validate_generation_mode", _wrap_validate_generation_mode),
    ):
        original: Any = getattr(GenerationMixin, name, None)
        if hasattr(original, "__heterospec_original__"):
            continue
        found = list(inspect.signature(original).parameters) if original is not None else None
        if found != KNOWN_PARAMETERS[name]:
            raise ImportError(
                f"hf_heterospec needs `GenerationMixin.{name}({', '.join(KNOWN_PARAMETERS[name])})`; transformers "
                f"{transformers.__version__} has {found}. Install transformers 5.25, or a newer hf_heterospec."
            )
        wrapped: Any = functools.wraps(original)(wrapper(original))
        wrapped.__heterospec_original__ = original
        setattr(GenerationMixin, name, wrapped)


def uninstall() -> None:
    """Put upstream's methods back."""
    for name in KNOWN_PARAMETERS:
        method = getattr(GenerationMixin, name)
        setattr(GenerationMixin, name, getattr(method, "__heterospec_original__", method))


def _wrap_assisted_decoding(original: Any) -> Any:
    def _assisted_decoding(self: Any, input_ids: Any, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        if not isinstance(assistant_model, HeteroSpecHead):
            return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        if kwargs.get("synced_gpus"):
            raise ValueError("A HeteroSpecHead cannot decode with synced_gpus (FSDP, ZeRO-3). Pass synced_gpus=False.")
        if input_ids.shape[0] != 1:
            raise ValueError(
                f"A HeteroSpecHead decodes one sequence at a time; got a batch of {input_ids.shape[0]}. Generate the "
                "prompts one by one, or leave out assistant_model."
            )
        for unused in ("synced_gpus", "inputs_tensor", "assistant_tokenizer", "tokenizer"):
            kwargs.pop(unused, None)
        return decode(self, assistant_model, input_ids, *args, **kwargs)

    return _assisted_decoding


def _wrap_validate_generation_mode(original: Any) -> Any:
    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any
    ) -> None:
        if isinstance(generation_mode_kwargs.get("assistant_model"), HeteroSpecHead):
            _refuse_unsupported(self, generation_mode, generation_config)
        original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _refuse_unsupported(model: Any, generation_mode: GenerationMode, generation_config: Any) -> None:
    """Raise one clear ValueError for what a head cannot do, before anything is prepared."""
    reasons = {
        f"num_beams={generation_config.num_beams}": generation_mode != GenerationMode.ASSISTED_GENERATION,
        f"num_return_sequences={generation_config.num_return_sequences}": generation_config.num_return_sequences > 1,
        "output_attentions=True": generation_config.output_attentions,
        "use_cache=False": generation_config.use_cache is False,
        "an encoder-decoder target": model.config.is_encoder_decoder,
        "a target that keeps no `Cache`": not model._supports_default_dynamic_cache(),
    }
    if refused := [reason for reason, applies in reasons.items() if applies]:
        raise ValueError(
            f"A HeteroSpecHead cannot decode with {' or '.join(refused)}: it decodes one sequence of a decoder-only "
            "model greedily or by sampling. Change that, or leave out assistant_model."
        )
    DraftSettings.resolve(generation_config)  # raises on values out of range
