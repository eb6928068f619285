"""Training: what a head learns from must be what it meets at inference, and nothing may be lost by a kill."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_heterospec.configuration import HeteroSpecConfig
from hf_heterospec.head import HeteroSpecHead
from hf_heterospec.training.answering import CorpusGenerator, CorpusSettings, Prompt, Row
from hf_heterospec.training.answers import REPEATED_RUN, Answer, read_answers, read_jsonl
from hf_heterospec.training.chains import collate, draft_chains, step_targets, target_to_draft
from hf_heterospec.training.checkpoint import checkpoints
from hf_heterospec.training.cli import add_parsers
from hf_heterospec.training.corpus import CorpusFolder, generate_corpus
from hf_heterospec.training.features import Example, ShardReader, target_pass
from hf_heterospec.training.loss import soft_cross_entropy
from hf_heterospec.training.overlap import BenchmarkFilter
from hf_heterospec.training.store import FeatureStore, split_answers
from hf_heterospec.training.trainer import HeadTrainer, TrainSettings
from hf_heterospec.training.vocabulary import draft_vocabulary, new_head, with_vocabulary

LAYERS = [1, 2, 3]


def tiny_head(**overrides) -> HeteroSpecHead:
    torch.manual_seed(0)
    config = HeteroSpecConfig(
        vocab_size=96,
        draft_vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        **overrides,
    )
    head = HeteroSpecHead(config).float()
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    head.d2t.copy_(torch.arange(64) // 2)  # draft ids 0 1 2 3 .. are target ids 0 1 3 4 ..
    return head


def random_example(prompt: int, answer: int, *, k: int = 8) -> Example:
    n = prompt + answer
    ids = torch.stack([torch.randperm(96)[:k] for _ in range(answer)])
    logits = torch.randn(answer, k).sort(descending=True).values
    return Example(torch.randint(0, 96, (n,)).int(), prompt, torch.randn(n, 96), ids.int(), logits)


def tiny_target(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def answers_of(model, *, count: int, length: int = 24, vocab: int = 96) -> list[Answer]:
    """Greedy answers to random prompts, of several sources."""
    generator = torch.Generator().manual_seed(1)
    settings = CorpusSettings(rows=16, max_new_tokens=length, max_repeated_tokens=length)
    prompts = [
        Prompt(f"p{i}", {}, torch.randint(1, vocab, (4 + i % 5,), generator=generator).tolist()) for i in range(count)
    ]
    rows = CorpusGenerator(model, settings=settings, longest_prompt=8, eos_ids={0}).run(prompts)
    finished = sorted(rows, key=lambda row: int(row.prompt.id[1:]))
    return [
        Answer(row.prompt.id, f"source {i % 3}", f"prompt {i}", row.prompt.ids, row.response_ids)
        for i, row in enumerate(finished)
    ]


def filled_store(folder: Path, model, answers: list[Answer], *, held_out: int = 8) -> FeatureStore:
    store = FeatureStore(folder, answers, held_out=held_out, seed=0, description={"target": "tiny"})
    store.extract(model, layers=LAYERS, accelerator=Accelerator(cpu=True))
    return store


# The training-time test


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_each_step_of_the_training_equals_drafting_that_chain(norm_before_residual):
    """The head at inference, fed pair by pair through its cache, is the reference: same outputs, step by step.

    A chain from anchor t = 5 sees, at inference (rows are what is fed, x what it attends to):

                    pair 0 .. 5   step 1   step 2
        pair 5      x x x x x x
        step 1      x x x x x x   x
        step 2      x x x x x x   x        x
    """
    head = tiny_head(norm_before_residual=norm_before_residual)
    examples = [random_example(4, 13), random_example(2, 9)]
    embed = nn.Embedding(96, 32)
    batch = collate(examples, fraction=1.0, generator=torch.Generator().manual_seed(0))
    counts = [12, 12, 6, 3]
    with torch.no_grad():
        steps = list(draft_chains(head, batch, embeddings=embed(batch.input_ids), num_anchors=counts))
        for row, example in enumerate(examples):
            ids = example.input_ids.long()
            for column, (t, room) in enumerate(zip(batch.anchors[row].tolist(), batch.room[row].tolist(), strict=True)):
                cache = head.new_cache()
                hidden = head(
                    embed(ids[None, 1 : t + 2]),
                    head.fc(example.features[None, : t + 1]),
                    position_ids=torch.arange(t + 1)[None],
                    cache=cache,
                    start=0,
                )[:, -1:]
                for step in range(min(room, len(counts))):
                    if step > 0:
                        hidden = head(
                            embed(ids[None, t + step + 1 : t + step + 2]),
                            hidden,
                            position_ids=torch.tensor([[t + step]]),
                            cache=cache,
                            start=t + step,
                            mask=torch.zeros(1, t + step + 1),
                        )
                    if column < counts[step]:
                        torch.testing.assert_close(steps[step][row, column], hidden[0, 0], rtol=1e-4, atol=1e-4)


def test_anchors_start_before_the_answers_second_token_and_end_before_its_last():
    """Prompt of 4, answer of 5: the first pair whose draft can be judged is (feature 3, token 4), which predicts 5."""
    example = random_example(4, 5)
    batch = collate([example], fraction=1.0, generator=torch.Generator().manual_seed(0))
    room = dict(zip(batch.anchors[0].tolist(), batch.room[0].tolist(), strict=True))
    assert room == {3: 4, 4: 3, 5: 2, 6: 1}


def test_targets_of_a_step_are_the_targets_distribution_two_positions_on():
    head, example = tiny_head(), random_example(4, 9)
    batch = collate([example], fraction=1.0, generator=torch.Generator().manual_seed(0))
    table = target_to_draft(head)
    targets = step_targets(batch, step=1, count=batch.anchors.shape[1], target_to_draft=table)
    for row, (anchor, room) in enumerate(zip(batch.anchors[0].tolist(), batch.room[0].tolist(), strict=True)):
        if room <= 1:
            assert not targets.draftable[row]
            continue
        source = anchor + 1 + 1 - 4  # position t + s + 1 emits token t + s + 2
        draft_ids = table[example.target_ids[source].long()]
        assert bool(targets.draftable[row]) == bool(draft_ids[0] >= 0)
        expected = torch.zeros(64)
        known = draft_ids >= 0
        expected[draft_ids[known]] = example.target_logits[source][known].softmax(-1)
        got = torch.zeros(64).scatter_add_(0, targets.ids[row], targets.probs[row])
        torch.testing.assert_close(got, expected)


def test_the_loss_without_logits_equals_cross_entropy():
    torch.manual_seed(0)
    hidden = torch.randn(50, 16, dtype=torch.double).float().requires_grad_()
    weight = torch.randn(40, 16).requires_grad_()
    ids = torch.stack([torch.randperm(40)[:6] for _ in range(50)])
    probs = torch.rand(50, 6)
    ids[:, 4:], probs[:, 4:] = ids[:, :1], 0.0  # two tokens outside the draft vocabulary
    probs = probs / probs.sum(-1, keepdim=True)
    weights = (torch.rand(50) > 0.3) / 50
    dense = torch.zeros(50, 40).scatter_add_(1, ids, probs)
    expected = (weights * torch.nn.functional.cross_entropy(hidden @ weight.T, dense, reduction="none")).sum()
    expected_grads = torch.autograd.grad(3 * expected, (hidden, weight))
    loss = soft_cross_entropy(hidden, weight, ids, probs, weights)
    torch.testing.assert_close(loss, expected)
    for got, want in zip(torch.autograd.grad(3 * loss, (hidden, weight)), expected_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_padding_and_company_do_not_change_features():
    model = tiny_target()
    answers = [Answer("a", "s", "", [3, 4, 5], [6, 7, 8, 9, 10]), Answer("b", "s", "", [11] * 9, [12, 13, 14])]
    together = list(target_pass(model, answers, layers=LAYERS, top_k=4))
    for answer, example in zip(answers, together, strict=True):
        ids = torch.tensor([answer.prompt_ids + answer.response_ids])
        with torch.no_grad():
            alone = model(ids, output_hidden_states=True)
        features = torch.cat([alone.hidden_states[layer] for layer in LAYERS], dim=-1)[0]
        torch.testing.assert_close(example.features, features, rtol=1e-4, atol=1e-4)
        top = alone.logits[0, len(answer.prompt_ids) :].topk(4)
        assert torch.equal(example.target_ids.long(), top.indices)


# The corpus


def test_slots_of_all_lengths_answer_as_generate_does():
    """Rows enter and leave at different times and move between slots: each answer is the model's own greedy one."""
    model = tiny_target()
    for answer in answers_of(model, count=40, length=12):
        ids = torch.tensor([answer.prompt_ids])
        expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=0, pad_token_id=0)
        assert answer.response_ids == expected[0, ids.shape[1] :].tolist()


def test_a_sampled_answer_depends_on_seed_and_prompt_only():
    model = tiny_target()
    prompts = [Prompt(f"p{i}", {}, [1 + i, 2, 3]) for i in range(6)]

    def sample(rows: int, seed: int) -> dict[str, list[int]]:
        settings = CorpusSettings(rows=rows, max_new_tokens=10, temperature=1.0, seed=seed)
        generator = CorpusGenerator(model, settings=settings, longest_prompt=3, eos_ids={0})
        return {row.prompt.id: row.response_ids for row in generator.run(prompts)}

    assert sample(2, 0) == sample(6, 0) != sample(6, 1)


def test_an_answer_that_loops_is_cut():
    row = Row(Prompt("p", {}, [1]))
    for token in [5, 6, 7] * 12:
        row.append(token)
    assert row.num_repeated == 36 - REPEATED_RUN - 2  # three different runs come first
    row.append(8)
    assert row.num_repeated == 0


def test_a_killed_corpus_run_loses_only_the_line_it_was_writing(tmp_path, caplog):
    folder = CorpusFolder(tmp_path, shard_size=3)
    for i in range(5):
        folder.append({"id": f"p{i}", "response_ids": [i]})
    with open(tmp_path / "unfinished.jsonl", "a") as file:
        file.write('{"id": "p5", "respo')
    again = CorpusFolder(tmp_path, shard_size=3)
    assert again.done == {"p0", "p1", "p2", "p3", "p4"}
    assert "unfinished.jsonl, line 3" in caplog.text
    again.append({"id": "p5", "response_ids": [5]})
    assert [row["id"] for path in again.shards for row in read_jsonl(path)] == [f"p{i}" for i in range(6)]
    assert not (tmp_path / "unfinished.jsonl").exists()


class Words:
    """A tokenizer whose chat template is the text itself: a number per word."""

    def apply_chat_template(self, chat, **kwargs):
        return {"input_ids": [1 + sum(map(ord, word)) % 90 for turn in chat for word in turn["content"].split()]}


def test_a_corpus_run_continues_where_it_was_killed_and_drops_benchmark_prompts(tmp_path, monkeypatch):
    model = tiny_target()
    texts = [f"tell me about {word} number {i}" for i, word in enumerate(["cats", "dogs", "hens", "cows", "ants"])]
    bench = "How many more eggs does Ann have than Bob when Bob has seven of them and Ann has twelve?"
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "licence": "MIT"}) + "\n" for text in [*texts, bench])
    )
    arguments = {
        "out": tmp_path / "corpus",
        "settings": CorpusSettings(rows=2, max_new_tokens=6, shard_size=3),
        "exclude": BenchmarkFilter([bench]),
    }
    append, written = CorpusFolder.append, []

    def killed_at_the_fifth(self, row):
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(row)
        append(self, row)

    monkeypatch.setattr(CorpusFolder, "append", killed_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        generate_corpus(model, Words(), [tmp_path / "prompts.jsonl"], **arguments)
    monkeypatch.setattr(CorpusFolder, "append", append)
    out = generate_corpus(model, Words(), [tmp_path / "prompts.jsonl"], **arguments)
    rows = [row for path in sorted(out.glob("*.jsonl.gz")) for row in read_jsonl(path)]
    assert sorted(row["prompt"] for row in rows) == sorted(texts)
    assert rows[:4] == written
    assert all(row["licence"] == "MIT" for row in rows)


def test_a_truncated_corpus_file_is_named(tmp_path):
    path = tmp_path / "answers-0000.jsonl.gz"
    folder = CorpusFolder(tmp_path, shard_size=2)
    for i in range(2):
        folder.append({"id": f"p{i}", "response_ids": list(range(99))})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"answers-0000\.jsonl\.gz .* cut short"):
        read_answers([path])


def test_prompts_that_overlap_with_a_benchmark_are_dropped():
    bench = "Darrell and Allen's ages are in the ratio of 7:11. If their total age now is 162, calculate Allen's age."
    template = "Write a function to solve the following problem in the Python language and return only the code: "
    others = [template + f"task number {i} about {word}" for i, word in enumerate(["cats", "dogs", "hens", "cows"])]
    drop = BenchmarkFilter([bench, *others])
    assert drop.overlaps(bench.upper())
    assert drop.overlaps("Please help. " + bench + " Thank you!")  # 13 words in a row
    assert drop.overlaps("Their total age now is 162, calculate Allen's age")  # half of the 8-word runs
    assert not drop.overlaps("Allen and Darrell are friends; how old is Allen?")
    assert not drop.overlaps(template + "something new about birds and their nests in high trees")  # common opening


# The trainer


SETTINGS = TrainSettings(
    epochs=3,
    batch_size=8,
    learning_rate=3e-3,
    warmup_steps=5,
    steps=3,
    checkpoint_every=1000,
    log_every=5,
    dtype="float32",
)


def trainer(store: FeatureStore, model, out: Path, *, settings: TrainSettings = SETTINGS) -> HeadTrainer:
    torch.manual_seed(0)
    vocabulary = draft_vocabulary(
        [a for part in store.answers.values() for a in part],
        size=model.config.vocab_size - 20,
        vocab_size=model.config.vocab_size,
        always=[0],
    )
    return HeadTrainer(
        new_head(model, vocabulary, layers=LAYERS),
        embed=model.get_input_embeddings().requires_grad_(False),
        store=store,
        settings=settings,
        out=out,
        accelerator=Accelerator(cpu=True),
    )


def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    model = tiny_target()
    store = filled_store(tmp_path / "features", model, answers_of(model, count=60))
    whole = trainer(store, model, tmp_path / "whole").train()
    killed = trainer(store, model, tmp_path / "killed")
    step = killed.train_step

    def stop_in_the_second_epoch(batch):
        if killed.progress["step"] == 9:
            killed.accelerator.set_trigger()
        return step(batch)

    killed.train_step = stop_in_the_second_epoch
    killed.train()
    assert killed.progress["step"] == 10
    resumed = trainer(store, model, tmp_path / "killed")
    assert resumed.progress["step"] == 10
    for name, weight in resumed.train().state_dict().items():
        assert torch.equal(weight, whole.state_dict()[name]), name


def test_a_truncated_checkpoint_file_is_named(tmp_path):
    model = tiny_target()
    store = filled_store(tmp_path / "features", model, answers_of(model, count=40))
    trainer(store, model, tmp_path / "run").save()
    path = checkpoints(tmp_path / "run" / "checkpoints")[-1] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors must be .* Delete .*step-0000000"):
        trainer(store, model, tmp_path / "run")


def test_a_truncated_feature_shard_is_named(tmp_path):
    model = tiny_target()
    store = filled_store(tmp_path, model, answers_of(model, count=20))
    path = store.path(next(iter(store.answers)))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"shard-\w+\.safetensors .* Delete it"):
        ShardReader(path)


def test_a_corpus_that_grows_keeps_its_features(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_heterospec.training.store.SHARD_SIZE", 8)
    model = tiny_target()
    answers = answers_of(model, count=28)
    before = filled_store(tmp_path, model, answers[:20], held_out=4)  # two full shards and a part of one
    after = FeatureStore(tmp_path, answers, held_out=4, seed=0, description={"target": "tiny"})
    assert len(after.missing()) == len(after.answers) - 2
    assert FeatureStore(tmp_path, answers[:20], held_out=4, seed=0, description={"target": "other"}).missing()
    trained = {answer.id for part in before.answers.values() for answer in part} - before.held_out_ids
    assert not trained & after.held_out_ids


def test_held_out_answers_are_evaluated_and_never_trained_on(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_heterospec.training.store.SHARD_SIZE", 8)
    model = tiny_target()
    answers = answers_of(model, count=20)
    store = filled_store(tmp_path, model, answers, held_out=5)

    def texts(selections):
        return sorted(shard[i].input_ids.tolist() for shard in selections for i in range(len(shard)))

    split = split_answers(answers, held_out=5, seed=0)
    assert texts(store.held_out()) == sorted(a.prompt_ids + a.response_ids for a in split.held_out)
    assert texts(store.train_shards()) == sorted(a.prompt_ids + a.response_ids for a in split.train)
    assert len(split.held_out) == 5


def test_a_head_whose_vocabulary_grows_scores_known_tokens_as_before():
    model = tiny_target()
    answers = answers_of(model, count=20)
    vocab = model.config.vocab_size
    small = new_head(model, draft_vocabulary(answers, size=40, vocab_size=vocab), layers=LAYERS)
    known = small.draft_to_target(torch.arange(40))
    more = draft_vocabulary(answers, size=70, vocab_size=vocab, always=known.tolist())
    grown = with_vocabulary(small, more, model.get_output_embeddings().weight.detach())
    assert set(known.tolist()) < set(more.tolist())
    hidden = torch.randn(3, model.config.hidden_size)
    places = torch.searchsorted(more, known)
    torch.testing.assert_close(grown.lm_head(hidden)[:, places], small.lm_head(hidden))
    # What it was started from it maps as the known rows: those are still the target's own here.
    torch.testing.assert_close(grown.lm_head.weight, model.get_output_embeddings().weight[more], atol=1e-4, rtol=1e-4)


def test_a_head_for_a_target_of_another_family_learns_to_draft(tmp_path):
    """GPT-NeoX: parallel residual, LayerNorm, biases, no grouped-query attention. The floor is far above chance."""
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=80,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.08,  # small weights repeat themselves: something to learn in seconds
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPTNeoXForCausalLM(config).eval()
    store = filled_store(tmp_path / "features", model, answers_of(model, count=240, vocab=80), held_out=40)
    settings = dataclasses.replace(SETTINGS, epochs=12, batch_size=16, fraction=1.0)
    run = trainer(store, model, tmp_path / "head", settings=settings)
    before = run.evaluate()
    run.train()
    after = run.evaluate()
    assert after.tau > before.tau + 0.5, (before, after)
    loaded = HeteroSpecHead.from_pretrained(tmp_path / "head")  # the official layout, complete
    assert loaded.config.target_layers(4) == LAYERS
    log = [json.loads(line) for line in (tmp_path / "head" / "log.jsonl").read_text().splitlines()]
    assert log[0]["tau"] == pytest.approx(before.tau, abs=1e-3)


def test_commands_parse_their_settings():
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    args = parser.parse_args(["train-head", "--corpus", "c", "--out", "o", "--step-decay", "0.5"])
    assert args.step_decay == 0.5
    args = parser.parse_args(["corpus", "--prompts", "p", "--out", "o", "--system", "Be brief."])
    assert args.system == "Be brief."


def save_tiny_target(folder: Path) -> None:
    tiny_target().save_pretrained(folder)
    words = {f"w{i}": i for i in range(96)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")), unk_token="w1", eos_token="w0"
    )
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }} {% endfor %}w5"
    tokenizer.save_pretrained(folder)


def test_both_commands_lead_from_prompts_to_a_head(tmp_path, capsys):
    save_tiny_target(tmp_path / "target")
    prompts = [{"prompt": f"w{i} w{i * 7 % 96} w{i * 5 % 96}", "source": f"s{i % 2}"} for i in range(60)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (tmp_path / "bench.jsonl").write_text(json.dumps({"turns": [prompts[0]["prompt"]]}))
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    common = f"--target {tmp_path}/target --target-dtype float32 --exclude {tmp_path}/bench.jsonl"
    corpus = f"corpus {common} --prompts {tmp_path}/prompts.jsonl --out {tmp_path}/corpus --max-new-tokens 16 --rows 8"
    train = (
        f"train-head {common} --corpus {tmp_path}/corpus --out {tmp_path}/head --epochs 1 --batch-size 8 "
        "--dtype float32 --held-out 10 --draft-vocab 60"
    )
    for command in (corpus, train, train):  # the second training finds itself finished
        args = parser.parse_args(command.split())
        assert args.run(args) == 0
    assert "59 answers" in capsys.readouterr().out
    head = HeteroSpecHead.from_pretrained(tmp_path / "head")
    assert head.config.draft_vocab_size == 60
    assert 0 in head.draft_to_target(torch.arange(60))  # the end of an answer can be drafted


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="`fraction` must be above 0"):
        TrainSettings(fraction=0.0)
    with pytest.raises(ValueError, match="`temperature` must be"):
        CorpusSettings(temperature=-1.0)
