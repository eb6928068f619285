"""Pictures of a fit: the paper's figures 1 and 4 for one's own model, calibration, costs, and predicted speed.

Needs matplotlib, which is installed with the extra `report`.
"""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibration import level_nodes
from .fitting import reached_full_depth
from .repository import StratificationPolicy
from .simulation import Replay, Simulator


def write_report(
    folder: str | Path,
    policy: StratificationPolicy,
    fitted: Simulator,
    judged: Simulator,
    arms: Mapping[str, Replay],
) -> Path:
    """Write pictures and `index.html` into `folder`.

    Args:
        fitted: the traces the policy was fitted on.
        judged: the traces the arms ran on.
        arms: `fitting.compare`.

    Returns:
        The path of `index.html`.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "The report needs matplotlib, which is not installed. `pip install hf-heterospec[report]`, or leave out "
            "--report."
        ) from error
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for title, words, draw in (
        ("Where accepted paths end (figure 1)", _tcr_words(policy, fitted), _draw_tcr),
        ("Acceptance against TCR", "Mean accepted tokens of the base tree's iterations, by TCR.", _draw_acceptance),
        ("Entropy against TCR (figure 4)", _entropy_words(policy, fitted), _draw_entropy),
        ("Strata", _strata_words(policy, fitted), _draw_strata),
        ("Calibration", "How often nodes are accepted, by their value; dots are the judged traces.", _draw_calibration),
        ("Copies", "How likely copied tokens are all right, by how many tokens before them repeat.", _draw_copies),
        ("Costs", _cost_words(policy), _draw_costs),
    ):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        draw(figure.subplots(), policy, judged if draw is _draw_calibration else fitted)
        name = f"{draw.__name__.removeprefix('_draw_')}.png"
        figure.savefig(folder / name, dpi=110)
        sections.append(f'<h2>{title}</h2><p>{html.escape(words)}</p><img src="{name}" alt="{title}">')
    page = f"<!doctype html><meta charset=utf-8><title>Draft policy</title>{_STYLE}<h1>Draft policy</h1>"
    page += f"<pre>{html.escape(json.dumps(dict(policy.provenance), indent=1))}</pre>"
    path = folder / "index.html"
    path.write_text(page + "<h2>Predicted speed</h2>" + _table(judged, policy, arms) + "".join(sections))
    return path


_STYLE = (
    "<style>body{font:16px sans-serif;max-width:60em;margin:2em auto}td,th{padding:.2em .8em;text-align:right}</style>"
)


def terminal_ranks(policy: StratificationPolicy, simulator: Simulator) -> tuple[NDArray, NDArray]:
    """TCR and accepted tokens of the base tree at every position: `[positions]` both; TCR is -1 where nothing is
    accepted."""
    depth, nodes = policy.strata.depth, policy.strata.num_nodes
    ranks = simulator.ranks[:, : depth + 1, depth]
    kept = np.cumprod((ranks >= 0) & (ranks < nodes - 1), axis=1)
    accepted = kept.sum(axis=1)
    last = np.take_along_axis(ranks, np.maximum(accepted - 1, 0)[:, None], axis=1)[:, 0]
    return np.where(accepted > 0, last, -1), accepted


def _tcr_words(policy: StratificationPolicy, simulator: Simulator) -> str:
    ranks, _ = terminal_ranks(policy, simulator)
    quantiles = np.quantile(ranks[ranks >= 0], (0.25, 0.5, 0.75, 0.9)).round().astype(int).tolist()
    share = (ranks[ranks >= 0] < policy.strata.num_nodes / 4).mean()
    return (
        f"Rank of the last accepted node among {policy.strata.num_nodes}. Quantiles 25/50/75/90 %: {quantiles}; "
        f"{share:.0%} lie in the first quarter."
    )


def _entropy_words(policy: StratificationPolicy, simulator: Simulator) -> str:
    ranks, _ = terminal_ranks(policy, simulator)
    entropy = simulator.entropies[:, policy.strata.depth]
    reached = reached_full_depth(simulator.ranks, depth=policy.strata.depth, num_nodes=policy.strata.num_nodes)

    def correlation(rows: NDArray[np.bool_]) -> str:
        return f"{np.corrcoef(_ranking(entropy[rows]), _ranking(ranks[rows]))[0, 1]:.2f}"

    return (
        f"H(P*) when the base tree is drafted. Rank correlation with TCR: {correlation(reached)} over the "
        f"{reached.sum()} positions accepted to full depth, which the paper keeps, {correlation(ranks >= 0)} over all "
        "that accept anything."
    )


def _ranking(values: NDArray) -> NDArray:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable")


def _strata_words(policy: StratificationPolicy, simulator: Simulator) -> str:
    return (
        f"Cuts {[round(cut, 3) for cut in policy.strata.cuts]}; trees of B0, B1, B2: "
        f"{[tuple(tier) for tier in policy.strata.tiers]} (depth, nodes)."
    )


def _cost_words(policy: StratificationPolicy) -> str:
    return "; ".join(f"{passes}: {json.dumps(dict(costs.machine))}" for passes, costs in policy.costs.items())


def _draw_tcr(axes: Any, policy: StratificationPolicy, simulator: Simulator) -> None:
    ranks, _ = terminal_ranks(policy, simulator)
    axes.hist(ranks[ranks >= 0], bins=np.arange(policy.strata.num_nodes) - 0.5)
    axes.set(xlabel="TCR", ylabel="positions")


def _draw_by_rank(axes: Any, ranks: NDArray, values: NDArray, nodes: int, label: str, who: str) -> None:
    edges = np.unique(np.linspace(0, nodes, 13).astype(int))
    places = [(ranks >= low) & (ranks < high) for low, high in itertools.pairwise(edges)]
    filled = [(low, values[rows].mean()) for low, rows in zip(edges, places, strict=False) if rows.sum() > 4]
    if not filled:
        return
    axes.plot(*zip(*filled, strict=True), marker="o", label=who)
    axes.set(xlabel="TCR", ylabel=label)
    axes.legend()


def _draw_acceptance(axes: Any, policy: StratificationPolicy, simulator: Simulator) -> None:
    ranks, accepted = terminal_ranks(policy, simulator)
    _draw_by_rank(axes, ranks, accepted, policy.strata.num_nodes, "accepted tokens", "all positions")


def _draw_entropy(axes: Any, policy: StratificationPolicy, simulator: Simulator) -> None:
    ranks, _ = terminal_ranks(policy, simulator)
    depth, nodes = policy.strata.depth, policy.strata.num_nodes
    entropy, reached = simulator.entropies[:, depth], reached_full_depth(simulator.ranks, depth=depth, num_nodes=nodes)
    for rows, who in ((reached, "accepted to full depth"), (ranks >= 0, "all positions")):
        if rows.any():
            _draw_by_rank(axes, ranks[rows], entropy[rows], nodes, "H(P*), nats", who)


def _draw_strata(axes: Any, policy: StratificationPolicy, simulator: Simulator) -> None:
    entropy = simulator.entropies[:, policy.strata.depth]
    places = np.searchsorted(policy.strata.cuts, entropy)
    counts = np.bincount(places, minlength=len(policy.strata.cuts) + 1)
    bars = axes.bar([f"B{place}" for place in range(len(counts))], counts)
    axes.bar_label(bars)
    axes.set(ylabel="positions")


def _draw_calibration(axes: Any, policy: StratificationPolicy, simulator: Simulator) -> None:
    for level, curve in enumerate(policy.throughput.calibration.acceptance[:4], start=1):
        line = axes.plot(np.exp(curve.x), curve.y, label=f"level {level}")[0]
        values, accepted = level_nodes(simulator.traces, level, max_nodes=20)
        order = np.argsort(values, axis=None)
        groups = np.array_split(order, 60)
        axes.plot(
            [np.exp(values.ravel()[rows]).mean() for rows in groups],
            [accepted.ravel()[rows].mean() for rows in groups],
            ".",
            color=line.get_color(),
        )
    axes.plot([0, 1], [0, 1], "k:", lw=1)
    axes.set(xlabel="draft confidence exp(V)", ylabel="accepted")
    axes.legend()


def _draw_copies(axes: Any, policy: StratificationPolicy, simulator: Simulator) -> None:
    for count, curve in enumerate(policy.throughput.calibration.copies, start=1):
        if count in (1, 2, 4, 8, 15):
            axes.plot(curve.x, curve.y, marker="o", label=f"{count} tokens")
    axes.set(xlabel="tokens repeated", ylabel="accepted", ylim=(0, 1))
    axes.legend()


def _draw_costs(axes: Any, policy: StratificationPolicy, simulator: Simulator) -> None:
    levels = range(1, policy.strata.depth + 2)
    for passes, costs in policy.costs.items():
        axes.plot(*zip(*costs.target, strict=True), marker="o", label=f"target pass of N nodes, {passes}")
        axes.plot(levels, [costs.drafting(level) for level in levels], ".--", label=f"drafting N levels, {passes}")
    axes.set(xlabel="N", ylabel="ms")
    axes.set_ylim(bottom=0)
    axes.legend()


def _table(simulator: Simulator, policy: StratificationPolicy, arms: Mapping[str, Replay]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}<td>{arm.speedup:.3f}<td>{arm.tau:.2f}<td>{arm.rounds}<td>{arm.verified_tokens}"
        f"<td>{arm.tokens_per_second:.1f}<td>{html.escape(_most_common(arm))}"
        for name, arm in arms.items()
    )
    head = "".join(f"<th>{title}" for title in ("", "x plain", "tau", "target calls", "verified", "tokens/s", "tiers"))
    return f"<table><tr>{head}{rows}</table>"


def _most_common(arm: Replay) -> str:
    return ", ".join(f"{tier} {count}" for tier, count in arm.tiers.most_common(6))
