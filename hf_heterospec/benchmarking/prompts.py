"""Prompt sets: JSONL files whose lines hold `turns` (the first is asked) or `prompt`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path


def load_prompt_sets(paths: Iterable[str | Path], *, num_prompts: int) -> dict[str, list[str]]:
    """The first `num_prompts` prompts of each file, by the file's stem. A folder stands for its `*.jsonl` files.

    Raises:
        ValueError: for a file without prompts, or with a line that is none.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    sets = {file.stem: [_prompt_of(line, file) for line in _lines(file)[:num_prompts]] for file in files}
    if not sets or not all(sets.values()):
        raise ValueError(
            f"Prompt sets must be JSONL files with at least one line; got {[str(path) for path in paths]}. "
            'Pass files with lines such as {"turns": ["..."]}, or a folder of them.'
        )
    return sets


def _lines(file: Path) -> list[str]:
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _prompt_of(line: str, file: Path) -> str:
    try:
        data = json.loads(line)
        prompt = data["turns"][0] if "turns" in data else data["prompt"]
    except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"A line of {file} is no prompt ({error!r}); got {line[:80]!r}; allowed: a JSON object with `turns` or "
            "`prompt`. Rewrite that line."
        ) from error
    return str(prompt)
