"""The head: loading, saving, and the traps that published heads hold."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import chat_ids, draft_config, prompt_of, tiny_head, tiny_target
from safetensors.torch import load_file, save_file

from hf_heterospec import HeteroSpecConfig, HeteroSpecHead
from hf_heterospec.configuration import DraftSettings
from hf_heterospec.drafting import HeteroSpecCandidateGenerator
from hf_heterospec.targets import load_default_target


@pytest.fixture
def folder(head, tmp_path):
    head.save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def rewrite(folder, change):
    """Apply `change` to the state dict on disk."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_saving_and_loading_keeps_every_bit(head, folder):
    loaded = HeteroSpecHead.from_pretrained(folder)
    loaded.save_pretrained(folder / "again")
    assert (folder / "again" / "config.json").read_text() == (folder / "config.json").read_text()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_the_file_is_the_official_layout(folder):
    names = set(load_file(folder / "model.safetensors"))
    layer = {f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"} | {
        f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")
    }
    norms = {f"midlayer.{x}.weight" for x in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    assert names == layer | norms | {"fc.weight", "norm.weight", "lm_head.weight", "d2t"}
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]


def test_a_pickle_with_plain_tensors_loads(folder):
    """SafeAILab publishes `pytorch_model.bin`; it is read without running what it may carry."""
    state = load_file(folder / "model.safetensors") | {"t2d": torch.ones(16, dtype=torch.bool)}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    loaded = HeteroSpecHead.from_pretrained(folder)
    assert torch.equal(loaded.fc.weight, state["fc.weight"])


def test_a_pickle_that_runs_code_is_refused(folder, tmp_path):
    class Malicious:
        def __reduce__(self):
            return (shutil.rmtree, (str(tmp_path / "head"),))

    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Malicious()}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights_only"):
        HeteroSpecHead.from_pretrained(folder)
    assert folder.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("fc.weight"), "missing keys: fc.weight"),
        (lambda s: s.update({"embed.weight": torch.zeros(2)}), "unexpected keys: embed.weight"),
        (lambda s: s.update({"fc.weight": torch.zeros(32, 64)}), "mismatched keys: .*fc.weight"),
        (lambda s: s.update({"model.norm.weight": s.pop("norm.weight")}), "model.norm.weight"),
    ],
)
def test_loading_is_strict(folder, change, message):
    """`strict=False` turned heads with other names into random weights without a word (vLLM 45669, EAGLE 258)."""
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        HeteroSpecHead.from_pretrained(folder)


def test_no_fallback_for_a_missing_folder(tmp_path):
    with pytest.raises(OSError, match="nothing"):
        HeteroSpecHead.from_pretrained(tmp_path / "nothing")


@pytest.mark.parametrize("case", ["missing", "outside", "twice"])
def test_draft_vocabulary_is_checked(target, tmp_path, case):
    """A head saved without d2t, or with a wrong one, collapses silently elsewhere (NeMo 2447, verl-SpeCo 67)."""
    head = tiny_head(target, draft_vocab_size=10)
    head.d2t.copy_(torch.arange(10) * 0 + torch.tensor([0] * 5 + [3] * 5))
    head.save_pretrained(tmp_path)
    HeteroSpecHead.from_pretrained(tmp_path)
    broken = {
        "missing": lambda s: s.pop("d2t"),
        "outside": lambda s: s["d2t"].add_(7),
        "twice": lambda s: s["d2t"].__setitem__(5, -1),
    }
    rewrite(tmp_path, broken[case])
    with pytest.raises(ValueError, match="d2t"):
        HeteroSpecHead.from_pretrained(tmp_path)


def test_whole_vocabulary_needs_no_d2t(folder):
    rewrite(folder, lambda state: state.pop("d2t"))
    head = HeteroSpecHead.from_pretrained(folder)
    assert head.draft_to_target(torch.arange(16)).tolist() == list(range(16))


def test_reduced_draft_vocabulary_decodes_exactly(target):
    head = tiny_head(target, draft_vocab_size=9)
    head.d2t.copy_(torch.tensor([1, 1, 2, 2, 2, 5, 5, 6, 6]))
    plain = target.generate(prompt_of(), do_sample=False, max_new_tokens=40)
    output = target.generate(prompt_of(), generation_config=draft_config(max_new_tokens=40), assistant_model=head)
    assert output.tolist() == plain.tolist()
    assert head.last_statistics.accepted_tokens > 0


def test_a_separate_lm_head_is_never_tied(target, tmp_path):
    """AngelSlim configs say `tie_word_embeddings: true`; transformers >= 4.54.1 would overwrite the lm_head."""
    head = tiny_head(target, draft_vocab_size=10)
    head.d2t.copy_(torch.arange(10) * 0)
    head.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = HeteroSpecHead.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, head.lm_head.weight)
    assert not loaded.config.tie_word_embeddings


def test_rope_base_of_configs_old_and_new(folder):
    """No `rope_theta` means 10000, whatever the target uses."""
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    for extra, base in (({}, 10_000.0), ({"rope_theta": 500_000.0}, 500_000.0)):
        (folder / "config.json").write_text(json.dumps(config | extra))
        assert HeteroSpecHead.from_pretrained(folder).config.rope_parameters["rope_theta"] == base


def test_positions_beyond_the_heads_config(target):
    """Prompts over 2048 crash where the RoPE table has the config's size (vLLM 48894, sglang 3574)."""
    head = tiny_head(target, max_position_embeddings=8)
    plain = target.generate(prompt_of(40), do_sample=False, max_new_tokens=24)
    output = target.generate(prompt_of(40), generation_config=draft_config(), assistant_model=head)
    assert output.tolist() == plain.tolist()
    roomy = tiny_head(target)
    target.generate(prompt_of(40), generation_config=draft_config(), assistant_model=roomy)
    assert head.last_statistics.accepted_at_depth == roomy.last_statistics.accepted_at_depth


@pytest.mark.parametrize("head_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_head_follows_the_targets_dtype(target, head_dtype):
    """fp16 heads beside bf16 targets are normal (EAGLE 259)."""
    target = target.to(torch.bfloat16)
    head = tiny_head(target).to(head_dtype)
    output = target.generate(prompt_of(), generation_config=draft_config(), assistant_model=head)
    assert output.shape[1] == prompt_of().shape[1] + 24
    assert head.dtype == torch.bfloat16


def test_heads_own_settings_yield_to_the_calls(target, folder):
    (folder / "generation_config.json").write_text(json.dumps({"draft_depth": 0, "draft_total_tokens": 4}))
    head = HeteroSpecHead.from_pretrained(folder)
    target.generate(prompt_of(), assistant_model=head, do_sample=False, max_new_tokens=24)
    assert len(head.last_statistics.drafted_at_depth) == 1
    target.generate(prompt_of(), assistant_model=head, generation_config=draft_config(draft_depth=2))
    assert len(head.last_statistics.drafted_at_depth) == 3
    head.save_pretrained(folder / "again")
    again = HeteroSpecHead.from_pretrained(folder / "again").generation_config
    assert (again.draft_depth, again.draft_total_tokens) == (0, 4)


def test_wrong_types_in_the_config_raise():
    with pytest.raises(Exception, match="draft_vocab_size"):
        HeteroSpecConfig(draft_vocab_size="many")


def test_head_keys_are_refreshed_with_target_features(target, head):
    """After every round the stable cache is what one pass over all target features gives: nothing the head made of
    its own guesses stays (vLLM 14649: 8-15 % shorter acceptance)."""
    settings = DraftSettings(depth=3, top_k=4, total_tokens=20)
    kept = {}
    original = HeteroSpecCandidateGenerator.observe

    def observe(self, features, next_ids, position_ids):
        original(self, features, next_ids, position_ids)
        kept["drafter"] = self

    HeteroSpecCandidateGenerator.observe = observe
    try:
        ids = target.generate(prompt_of(), generation_config=draft_config(max_new_tokens=40), assistant_model=head)
    finally:
        HeteroSpecCandidateGenerator.observe = original
    drafter = kept["drafter"]
    length = drafter.cache.length
    fresh = HeteroSpecCandidateGenerator(head, target, settings=settings)
    with torch.no_grad():
        states = target(ids[:, :length], output_hidden_states=True).hidden_states
        features = torch.cat([states[i] for i in (1, 2, 3)], dim=-1)
        fresh.observe(features, ids[:, 1 : length + 1], torch.arange(length)[None])
    for name in ("keys", "values"):
        ours, theirs = (getattr(d.cache, name)[:, :, :length] for d in (drafter, fresh))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_stale_keys_would_cost_acceptance(smollm, bench_prompts, monkeypatch):
    """The same on the real head: with the features left as drafted, acceptance falls."""
    model, tokenizer, head = smollm
    config = draft_config(max_new_tokens=48, draft_depth=4, draft_top_k=1, draft_total_tokens=6)

    def tau():
        accepted = rounds = 0
        for row in bench_prompts[3:9]:
            model.generate(chat_ids(tokenizer, row["prompt"]), generation_config=config, assistant_model=head)
            accepted += head.last_statistics.accepted_tokens
            rounds += head.last_statistics.rounds
        return accepted / rounds + 1

    refreshed = tau()
    observe = HeteroSpecCandidateGenerator.observe_accepted

    def observe_only_the_last(self, features, path, ids):
        """Keep the tree's own rows for all but the newest pair, as a cache that is never refreshed does."""
        stale = len(path) - 1
        self.cache.length += stale
        self.next_position = self.next_position + stale
        observe(self, features, path[-1:], ids)

    monkeypatch.setattr(HeteroSpecCandidateGenerator, "observe_accepted", observe_only_the_last)
    assert refreshed > tau() + 0.02


def test_default_target_in_bf16_is_the_same_model(smollm):
    model, _, _ = smollm
    half, _ = load_default_target(torch.bfloat16)
    assert torch.equal(half.lm_head.weight, model.lm_head.weight.bfloat16())
    assert getattr(half.config, "quantization_config", None) is None
    assert not tiny_target().training
