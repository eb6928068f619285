"""Answers: what a corpus consists of, how it is read, and which of it must stay out of training."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

REPEATED_RUN = 8  # tokens: a run that an answer already had is a repetition


class Answer(NamedTuple):
    """One prompt and what the target answered, as token ids. `source` names where the prompt came from, `licence` the
    prompt's licence."""

    id: str
    source: str
    prompt: str
    prompt_ids: list[int]
    response_ids: list[int]
    licence: str = "unknown"

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a `.jsonl` or `.jsonl.gz` file.

    Raises:
        ValueError: naming the file and line, when the file is truncated or a line is no JSON object.
    """
    number = 0
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as lines:
            for line in lines:
                yield json.loads(line)
                number += 1
    except (EOFError, zlib.error, gzip.BadGzipFile, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} must hold one JSON object per line; reading stopped after line {number} ({error}). "
            "The file is damaged or was cut short: write or download it again."
        ) from error


def fields_of(row: dict[str, Any], names: Sequence[str], path: Path) -> list[Any]:
    """The named fields of a row of `path`.

    Raises:
        ValueError: naming the file and the fields it lacks.
    """
    if missing := [name for name in names if name not in row]:
        raise ValueError(
            f"Each line of {path} must have {', '.join(map(repr, names))}; got {', '.join(map(repr, row))}. "
            f"Add {', '.join(map(repr, missing))}."
        )
    return [row[name] for name in names]


def read_answers(paths: Iterable[Path]) -> list[Answer]:
    """All answers of corpus files, in file order. Answers too short to learn from (under three tokens) are left out.

    Raises:
        ValueError: naming the file that is damaged or lacks a field of `Answer`.
    """
    required = [name for name in Answer._fields if name not in Answer._field_defaults]
    answers = []
    for path in paths:
        for row in read_jsonl(path):
            given = dict(zip(required, fields_of(row, required, path), strict=True))
            answers.append(Answer(**given, licence=row.get("licence", "unknown")))
    return [answer for answer in answers if len(answer.response_ids) >= 3]


def describe_corpus(answers: Sequence[Answer]) -> dict[str, Any]:
    """What a head was trained on, for its card: sizes, and answers per source and licence, most first."""
    families = Counter(answer.source.split(":")[0] for answer in answers)
    return {
        "answers": len(answers),
        "answer_tokens": sum(len(answer.response_ids) for answer in answers),
        "prompt_tokens": sum(len(answer.prompt_ids) for answer in answers),
        "sources": dict(families.most_common()),
        "licences": dict(Counter(answer.licence for answer in answers).most_common()),
    }
