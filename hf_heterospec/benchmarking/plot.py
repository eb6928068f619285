"""The benchmark as a picture: tokens per second by set and arm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .report import Summary


def plot(summaries: Sequence[Summary], path: Path) -> None:
    """Write grouped bars with quartiles to `path` (its suffix is the format).

    Raises:
        ValueError: where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "--plot needs matplotlib, which is not installed. Install it with `pip install hf-heterospec[bench]`."
        ) from error
    sets, arms = (list(dict.fromkeys(getattr(row, name) for row in summaries)) for name in ("prompt_set", "arm"))
    rows = {(row.prompt_set, row.arm): row for row in summaries}
    figure = Figure(figsize=(2 + 1.6 * len(sets), 4), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(arms)
    for place, arm in enumerate(arms):
        own = [(number, rows[name, arm]) for number, name in enumerate(sets) if (name, arm) in rows]
        heights = [row.tokens_per_second for _, row in own]
        spread = [[max(row.tokens_per_second - row.low, 0) for _, row in own],
                  [max(row.high - row.tokens_per_second, 0) for _, row in own]]  # fmt: skip
        axes.bar([number + (place + 0.5) * width - 0.4 for number, _ in own], heights, width, label=arm, yerr=spread)
    axes.set_xticks(range(len(sets)), sets)
    axes.set_ylabel("tokens per second")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
