"""Records -> medians and spread per arm and set, speed-ups, a table, a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .arms import PLAIN, STOCK, Arm
from .runs import Record

MEAN = "mean"  # the row over all sets


@dataclass(frozen=True)
class Summary:
    """One arm on one set, or on the mean of all sets.

    Attributes:
        tokens_per_second: median over the prompts of new tokens by wall time, prompt included.
        low, high: its quartiles over the prompts.
        over_stock, over_plain: median over the prompts of the ratio to `stock` and to `plain-compiled` on the same
            prompt; `None` where that arm was not measured.
        target_calls, verified_tokens: summed over the prompts.
        split: shares of the time: prefill, head, target, other.
        peak_bytes: the highest of all calls.
    """

    arm: str
    prompt_set: str
    tokens_per_second: float
    low: float
    high: float
    over_stock: float | None
    over_plain: float | None
    tau: float | None
    target_calls: int | None
    verified_tokens: int | None
    split: dict[str, float] | None
    peak_bytes: int
    num_prompts: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(records: Sequence[Record]) -> list[Summary]:
    """One summary per arm and set, and one per arm over all sets (`prompt_set="mean"`), in the records' order."""
    arms, sets = (list(dict.fromkeys(getattr(record, name) for record in records)) for name in ("arm", "prompt_set"))
    arms.sort(key=lambda arm: (arm != STOCK, arm != "prompt-lookup", arm != PLAIN))
    speeds = {(arm, name): _speeds(_of(records, arm, name)) for arm in arms for name in sets}
    summaries = []
    for arm in arms:
        rows = [_summary(_of(records, arm, name), speeds, arm=arm, name=name) for name in sets if speeds[arm, name]]
        summaries += rows
        if len(rows) > 1:
            summaries.append(_mean(rows))
    return summaries


def _of(records: Sequence[Record], arm: str, prompt_set: str) -> list[Record]:
    return [record for record in records if (record.arm, record.prompt_set) == (arm, prompt_set)]


def _speeds(records: Sequence[Record]) -> dict[int, float]:
    """Tokens per second by prompt, the median of its repeats."""
    by_prompt: dict[int, list[float]] = {}
    for record in records:
        by_prompt.setdefault(record.prompt, []).append(record.new_tokens / record.seconds)
    return {prompt: statistics.median(values) for prompt, values in by_prompt.items()}


def _summary(
    records: Sequence[Record], speeds: dict[tuple[str, str], dict[int, float]], *, arm: str, name: str
) -> Summary:
    own = speeds[arm, name]
    values = sorted(own.values())
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    counted = [record for record in records if record.rounds is not None]
    rounds = sum(record.rounds or 0 for record in counted)
    accepted = sum((record.tau or 1) * (record.rounds or 0) for record in counted)
    parts = {part: sum(record.split[part] for record in counted if record.split) for part in _parts(counted)}
    total = sum(record.seconds for record in counted)
    return Summary(
        arm=arm,
        prompt_set=name,
        tokens_per_second=statistics.median(values),
        low=low,
        high=high,
        over_stock=_median_ratio(own, speeds.get((STOCK, name), {})),
        over_plain=_median_ratio(own, speeds.get((PLAIN, name), {})),
        tau=accepted / rounds if rounds else None,
        target_calls=rounds if counted else None,
        verified_tokens=sum(record.verified_tokens or 0 for record in counted) if counted else None,
        split={part: seconds / total for part, seconds in parts.items()} if counted else None,
        peak_bytes=max(record.peak_bytes for record in records),
        num_prompts=len(own),
    )


def _median_ratio(own: dict[int, float], base: dict[int, float]) -> float | None:
    """Over the prompts that both decoded; `None` where there are none."""
    ratios = [speed / base[prompt] for prompt, speed in own.items() if prompt in base]
    return statistics.median(ratios) if ratios else None


def _parts(records: Sequence[Record]) -> list[str]:
    return list(records[0].split or ()) if records else []


def _mean(rows: Sequence[Summary]) -> Summary:
    def mean(get: Callable[[Summary], float | None]) -> float | None:
        values = [value for row in rows if (value := get(row)) is not None]
        return statistics.fmean(values) if values else None

    def total(get: Callable[[Summary], int | None]) -> int | None:
        values = [value for row in rows if (value := get(row)) is not None]
        return sum(values) if values else None

    splits = [row.split for row in rows if row.split]
    return Summary(
        arm=rows[0].arm,
        prompt_set=MEAN,
        tokens_per_second=mean(lambda row: row.tokens_per_second) or 0.0,
        low=mean(lambda row: row.low) or 0.0,
        high=mean(lambda row: row.high) or 0.0,
        over_stock=mean(lambda row: row.over_stock),
        over_plain=mean(lambda row: row.over_plain),
        tau=mean(lambda row: row.tau),
        target_calls=total(lambda row: row.target_calls),
        verified_tokens=total(lambda row: row.verified_tokens),
        split={part: statistics.fmean(split[part] for split in splits) for part in splits[0]} if splits else None,
        peak_bytes=max(row.peak_bytes for row in rows),
        num_prompts=sum(row.num_prompts for row in rows),
    )


def overall(summaries: Sequence[Summary]) -> list[Summary]:
    """The rows that speak for an arm: its mean, or its only set."""
    means = {summary.arm for summary in summaries if summary.prompt_set == MEAN}
    return [summary for summary in summaries if summary.prompt_set == MEAN or summary.arm not in means]


def verdict(summaries: Sequence[Summary]) -> str:
    """One sentence: the fastest arm, and plainly whether speculation pays here."""
    rows = {row.arm: row for row in overall(summaries)}
    drafting = [row for row in rows.values() if Arm.parse(row.arm).speculates]
    plain = rows.get(PLAIN) or rows.get("plain-eager") or rows.get(STOCK)
    if not drafting or plain is None:
        return f"The fastest arm is {max(rows.values(), key=lambda row: row.tokens_per_second).arm}."
    best = max(drafting, key=lambda row: row.tokens_per_second)
    ratio = (
        best.over_plain if plain.arm == PLAIN and best.over_plain else best.tokens_per_second / plain.tokens_per_second
    )
    if ratio < 1.02:
        return (
            f"Speculation does not pay here: the best of it, {best.arm}, runs at {ratio:.2f}x {plain.arm}. "
            "Decode plainly (draft_policy='off')."
        )
    return f"Speculation pays: {best.arm} runs at {ratio:.2f}x {plain.arm}."


def on_hardest(records: Sequence[Record], arm: str, *, num_prompts: int = 20) -> float | None:
    """Median ratio of an arm to `plain-compiled` on the prompts where its tau is lowest, whose texts the head knows
    least; `None` where either was not measured. (The prompts with the lowest ratio would be those with the unluckiest
    measurements.)"""
    taus = {(r.prompt_set, r.prompt): r.tau for r in records if r.arm == arm and r.tau is not None}
    hardest = sorted(taus, key=lambda prompt: taus[prompt])[:num_prompts]
    own, plain = ({name: _speeds(_of(records, kind, name)) for name, _ in hardest} for kind in (arm, PLAIN))
    ratios = [own[name][prompt] / plain[name][prompt] for name, prompt in hardest if prompt in plain[name]]
    return statistics.median(ratios) if ratios else None


def over_best_tree(
    records: Sequence[Record], summaries: Sequence[Summary], arm: str
) -> tuple[str, dict[str, float]] | None:
    """The fixed tree or chain with the most tokens per second, chosen in hindsight over all sets, and the median ratio
    of `arm` to it on the same prompts, by set and in the mean; `None` where either was not measured."""
    trees = [row for row in overall(summaries) if row.arm.startswith(("tree-", "chain-"))]
    if not trees or not any(record.arm == arm for record in records):
        return None
    best = max(trees, key=lambda row: row.tokens_per_second).arm
    ratios = {
        name: ratio
        for name in dict.fromkeys(record.prompt_set for record in records)
        if (ratio := _median_ratio(*(_speeds(_of(records, kind, name)) for kind in (arm, best)))) is not None
    }
    return best, ratios | {MEAN: statistics.fmean(ratios.values())}


def table(summaries: Sequence[Summary]) -> str:
    """All rows as text, columns aligned."""
    header = ["set", "arm", "tokens/s", "quartiles", "x stock", "x plain", "tau", "calls", "verified", "head", "target",
              "other", "MB"]  # fmt: skip
    lines = [header]
    for row in sorted(summaries, key=lambda row: row.prompt_set == MEAN):
        split = row.split or {}
        lines.append(
            [
                row.prompt_set,
                row.arm,
                f"{row.tokens_per_second:.1f}",
                f"{row.low:.1f}-{row.high:.1f}",
                _number(row.over_stock),
                _number(row.over_plain),
                _number(row.tau),
                str(row.target_calls or ""),
                str(row.verified_tokens or ""),
                *(f"{100 * split[part]:.0f}%" if part in split else "" for part in ("head", "target", "other")),
                f"{row.peak_bytes / 1e6:.0f}",
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
