"""The custom generation method that is pushed beside the head, run from its folder, offline."""

import importlib.metadata
import shutil
from pathlib import Path

import pytest
import torch
from conftest import tiny_head, tiny_target
from transformers import AutoModelForCausalLM

from hf_heterospec import HeteroSpecHead

REPOSITORY = Path(__file__).parents[1] / "hub_assets" / "SmolLM2-135M-Instruct-heterospec"


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    """A checkout on the path serves as the installed package that requirements.txt asks for."""
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.1.0" if name == "hf-heterospec" else version(name)
    )


def test_the_pushed_method_gives_the_output_of_plain_generate():
    model = tiny_target()
    head = tiny_head(model)
    ids = torch.tensor([[5, 9, 12, 3]])
    arguments = {"max_new_tokens": 24, "do_sample": False}
    plain = model.generate(ids, **arguments)
    ours = model.generate(
        ids, custom_generate=str(REPOSITORY), trust_remote_code=True, assistant_model=head, **arguments
    )
    assert torch.equal(ours, plain)
    assert head.last_statistics.rounds > 0


def test_a_head_can_be_named_by_its_folder(tmp_path):
    model = tiny_target()
    tiny_head(model).save_pretrained(tmp_path)
    ids = torch.tensor([[5, 9, 12, 3]])
    ours = model.generate(
        ids, custom_generate=str(REPOSITORY), trust_remote_code=True, head=str(tmp_path), max_new_tokens=24,
        do_sample=False,
    )  # fmt: skip
    assert torch.equal(ours, model.generate(ids, max_new_tokens=24, do_sample=False))


def test_a_model_repository_can_carry_the_method(tmp_path):
    """Loaded with `trust_remote_code=True`, the model's own `generate` drafts; otherwise it is upstream's."""
    source = tiny_target()
    source.save_pretrained(tmp_path)
    shutil.copytree(REPOSITORY / "custom_generate", tmp_path / "custom_generate")
    tiny_head(source).save_pretrained(tmp_path / "head")
    ids, arguments = torch.tensor([[5, 9, 12, 3]]), {"max_new_tokens": 24, "do_sample": False}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).generate(ids, **arguments)
    head = HeteroSpecHead.from_pretrained(tmp_path / "head")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert torch.equal(model.generate(ids, assistant_model=head, **arguments), plain)
    assert head.last_statistics.rounds > 0
    assert torch.equal(model.generate(input_ids=ids, head=str(tmp_path / "head"), **arguments), plain)


def test_remote_code_needs_consent():
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny_target().generate(torch.tensor([[5]]), custom_generate=str(REPOSITORY), trust_remote_code=False)
