"""HeteroSpec as a custom generation method.

    model.generate(**inputs, custom_generate="<this repository or folder>", trust_remote_code=True)

Drafts with a HeteroSpec head and verifies with the model; the output is that of plain `generate`. Afterwards
`head.last_statistics` says what happened, for a head passed as `assistant_model`.
"""

import functools

import torch
from transformers import GenerationMixin

from hf_heterospec import HeteroSpecHead
from hf_heterospec.targets import load_default_head


@functools.lru_cache(maxsize=4)
def load_head(location: str | None) -> HeteroSpecHead:
    return load_default_head() if location is None else HeteroSpecHead.from_pretrained(location)


@torch.no_grad()
def generate(inputs=None, *, model, head=None, assistant_model=None, **kwargs):
    """`generate` with a draft head.

    Args:
        inputs: as for `GenerationMixin.generate`, like every other argument.
        model: the target.
        head: folder or repository of the head; left out, the one published for SmolLM2-135M-Instruct.
        assistant_model: a head that is loaded already.
    """
    kwargs.pop("custom_generate", None)
    kwargs.pop("trust_remote_code", None)
    if assistant_model is None:
        assistant_model = load_head(head)
    # Not model.generate: a model repository that carries this file would call itself.
    return GenerationMixin.generate(model, inputs, assistant_model=assistant_model, **kwargs)
