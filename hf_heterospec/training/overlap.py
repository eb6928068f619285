"""Keep benchmark prompts out of training: a prompt that shares a long run of words with one is dropped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from .answers import read_jsonl

WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def ngrams(tokens: list[str], n: int) -> set[tuple[str, ...]]:
    """All runs of `n` words; a shorter text counts as one run."""
    if len(tokens) < n:
        return {tuple(tokens)} if tokens else set()
    return {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}


class BenchmarkFilter:
    """Tells prompts that overlap with benchmark prompts.

    A prompt overlaps when it equals a benchmark turn word for word, shares a run of 13 words with one (the usual
    test, GPT-3 appendix C), or when at least half of its 8-word runs occur in the benchmark (short prompts, slightly
    reworded). Runs that open many benchmark prompts alike, such as a task's instruction, are no evidence and are
    ignored: those that occur in more than `common` different benchmark prompts.
    """

    def __init__(self, prompts: Iterable[str], *, common: int = 3) -> None:
        texts = [words(prompt) for prompt in prompts]
        self.exact = {tuple(text) for text in texts}
        self.runs = {n: self._rare(texts, n, common) for n in (8, 13)}

    @classmethod
    def from_files(cls, paths: Iterable[Path]) -> BenchmarkFilter:
        """From JSONL files whose rows hold `turns` (a list of texts) or `prompt`."""
        return cls(turn for path in paths for row in read_jsonl(path) for turn in row.get("turns") or [row["prompt"]])

    @staticmethod
    def _rare(texts: list[list[str]], n: int, common: int) -> set[tuple[str, ...]]:
        counts: dict[tuple[str, ...], int] = {}
        for text in texts:
            if len(text) >= n:
                for run in ngrams(text, n):
                    counts[run] = counts.get(run, 0) + 1
        return {run for run, count in counts.items() if count <= common}

    def overlaps(self, prompt: str) -> bool:
        tokens = words(prompt)
        if tuple(tokens) in self.exact:
            return True
        if not self.runs[13].isdisjoint(ngrams(tokens, 13)):
            return True
        eights = ngrams(tokens, 8)
        return len(tokens) >= 8 and 2 * len(eights & self.runs[8]) >= len(eights)
