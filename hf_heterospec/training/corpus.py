"""The corpus: prompts answered by the target itself, which is what its head has to predict.

Finished answers are appended to `unfinished.jsonl` one by one, and sealed into `answers-NNNN.jsonl.gz` when there are
enough: a kill loses the answers in flight and nothing else.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .answering import CorpusGenerator, CorpusSettings, Prompt
from .answers import fields_of, read_jsonl
from .overlap import BenchmarkFilter

logger = logging.get_logger(__name__)


def read_prompts(paths: Iterable[Path], *, exclude: BenchmarkFilter) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `(id, row)` for each line with a `prompt` that overlaps with no benchmark; ids are file and line."""
    for path in paths:
        stem = path.name.removesuffix(".gz").removesuffix(".jsonl")
        for number, row in enumerate(read_jsonl(path)):
            (prompt,) = fields_of(row, ("prompt",), path)
            if not exclude.overlaps(prompt):
                yield f"{stem}-{number:06d}", row


def tokenize(
    prompts: Iterable[tuple[str, dict[str, Any]]], tokenizer: PreTrainedTokenizerBase, settings: CorpusSettings
) -> Iterator[Prompt]:
    """Apply the chat template; prompts over `max_prompt_tokens` are left out."""
    system = [{"role": "system", "content": settings.system}] if settings.system is not None else []
    for id_, row in prompts:
        chat = [*system, {"role": "user", "content": row["prompt"]}]
        encoded: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        ids = encoded["input_ids"]
        if len(ids) <= settings.max_prompt_tokens:
            yield Prompt(id_, row, ids)


class CorpusFolder:
    """The files of a corpus.

    Raises:
        ValueError: naming the file, when a sealed one is damaged.
    """

    def __init__(self, folder: Path, *, shard_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.shard_size = folder, shard_size
        self.unfinished = folder / "unfinished.jsonl"
        self.shards = sorted(folder.glob("answers-*.jsonl.gz"))
        self.done = {row["id"] for path in self.shards for row in read_jsonl(path)}
        self.pending = self._recover()
        self.done.update(row["id"] for row in self.pending)

    def _recover(self) -> list[dict[str, Any]]:
        """Rows of an earlier run that are not sealed yet. A last line cut by a kill is reported and dropped."""
        if not self.unfinished.exists():
            return []
        *lines, tail = self.unfinished.read_text().split("\n")
        rows = [json.loads(line) for line in lines]
        if tail:
            logger.warning(
                f"{self.unfinished}, line {len(lines) + 1}, was cut short when an earlier run stopped; it is dropped "
                "and its prompt will be answered again."
            )
            self._write_atomically(self.unfinished, "".join(line + "\n" for line in lines).encode())
        return [row for row in rows if row["id"] not in self.done]

    def append(self, row: dict[str, Any]) -> None:
        with open(self.unfinished, "a") as file:
            file.write(json.dumps(row) + "\n")
        self.done.add(row["id"])
        self.pending.append(row)
        if len(self.pending) >= self.shard_size:
            self.seal()

    def seal(self) -> None:
        """Turn the answers so far into a sealed file. A kill in between leaves both files; ids tell it later."""
        if self.pending:
            path = self.folder / f"answers-{len(self.shards):04d}.jsonl.gz"
            text = "".join(json.dumps(row) + "\n" for row in self.pending)
            self._write_atomically(path, gzip.compress(text.encode()))
            self.shards.append(path)
        self.unfinished.unlink(missing_ok=True)
        self.pending = []

    @staticmethod
    def _write_atomically(path: Path, data: bytes) -> None:
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(data)
        os.replace(partial, path)


def generate_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_files: Iterable[Path],
    *,
    out: Path,
    settings: CorpusSettings,
    exclude: BenchmarkFilter,
    limit: int | None = None,
) -> Path:
    """Answer every prompt once; prompts that `out` already answers are skipped.

    Returns:
        The folder, which then holds sealed shards only.

    Raises:
        ValueError: when two prompt files of one name would give their answers the same ids.
    """
    folder = CorpusFolder(out, shard_size=settings.shard_size)
    prompts = list(tokenize(read_prompts(prompt_files, exclude=exclude), tokenizer, settings))[:limit]
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise ValueError(
            "Answers are named after their prompts' files, so files must have different names; rename one."
        )
    todo = [prompt for prompt in prompts if prompt.id not in folder.done]
    # Rows of like length side by side: a step's views end at the longest.
    todo.sort(key=lambda prompt: len(prompt.ids))
    eos_ids = model.generation_config.eos_token_id
    eos = {eos_ids} if isinstance(eos_ids, int) else set(eos_ids or ())
    longest = max((len(prompt.ids) for prompt in todo), default=0)
    generator = CorpusGenerator(model, settings=settings, longest_prompt=longest, eos_ids=eos)
    tokens = 0
    with tqdm(total=len(prompts), initial=len(prompts) - len(todo), unit="answer") as bar:
        for row in generator.run(todo):
            tokens += len(row.response_ids)
            folder.append(
                {"id": row.prompt.id, **row.prompt.row, "prompt_ids": row.prompt.ids}
                | {"response_ids": row.response_ids, "temperature": settings.temperature}
            )
            bar.update()
            elapsed = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{tokens / max(elapsed, 1e-9):.0f} tokens/s", refresh=False)
    folder.seal()
    return out
