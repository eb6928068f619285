"""What a benchmark compares. An arm is a name and the arguments it adds to `generate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..configuration import DraftCompile, HeteroSpecGenerationConfig
from ..head import HeteroSpecHead
from .peers import has_economize

STOCK, PLAIN = "stock", "plain-compiled"
OURS_AND_STOCK = (STOCK, "prompt-lookup", PLAIN, "chain-5", "tree-60-5-10", "tree-16-1-10")
DEFAULT_ARMS = (*OURS_AND_STOCK, "economize-5") if has_economize() else OURS_AND_STOCK
SYNTAX = (
    "stock, prompt-lookup, plain-compiled, throughput, throughput-uncopied (drafts of the head alone), paper, "
    "paper-unpruned (extended depth alone), paper-alpha-ALPHA, chain-LEVELS, tree-NODES-DEPTH-WIDTH as in "
    "tree-60-5-10, plain-eager, and all of ours with -eager behind them; economize-LEVELS (the chain of the package "
    "economize, where installed)"
)


@dataclass(frozen=True)
class Arm:
    """One way of decoding.

    Attributes:
        name: see `SYNTAX`.
        draft: `draft_*` fields; `None` for arms that run without the head.
        generate: further arguments of `generate`.
        tiers: changes to the paper's tiers, arguments of `Strata.with_tiers`.
        peer_levels: length of the chain that the package `economize` drafts instead of us.
    """

    name: str
    draft: dict[str, Any] | None = None
    generate: dict[str, Any] = field(default_factory=dict)
    tiers: dict[str, Any] = field(default_factory=dict)
    peer_levels: int | None = None

    @property
    def speculates(self) -> bool:
        return self.name not in (STOCK, PLAIN, "plain-eager")

    @classmethod
    def parse(cls, name: str, *, compile: DraftCompile = "always") -> Arm:
        """The arm called `name`. `compile` is what arms with a head get, those called `-eager` excepted.

        Raises:
            ValueError: for a name that is no arm, and for an arm whose package is not installed.
        """
        base = name.removesuffix("-eager")
        draft: dict[str, Any] = {"draft_compile": compile if base == name else "never"}
        match [int(part) if part.isdecimal() else part for part in base.split("-")]:
            case ["stock"] if base == name:
                return cls(name)
            case ["prompt", "lookup"] if base == name:
                return cls(name, generate={"prompt_lookup_num_tokens": 10})
            case ["economize", int(levels)] if base == name:
                if not has_economize():
                    raise ValueError(f"{name} needs the package economize. Install it with `pip install economize`.")
                return cls(name, peer_levels=levels)
            case ["plain"] if base != name:
                return cls(name, draft | {"draft_policy": "off"})
            case ["plain", "compiled"] if base == name:
                return cls(name, draft | {"draft_policy": "off"})
            case ["throughput" | "paper" as policy]:
                return cls(name, draft | {"draft_policy": policy})
            case ["throughput", "uncopied"]:
                return cls(name, draft | {"draft_policy": "throughput", "draft_copies": False})
            case ["paper", "unpruned"]:
                return cls(name, draft | {"draft_policy": "paper"}, tiers={"prune": False})
            case ["paper", "alpha", int(alpha)]:
                return cls(name, draft | {"draft_policy": "paper"}, tiers={"alpha": alpha})
            case ["chain", int(levels)]:
                nodes, depth, width = levels + 1, levels - 1, 1
            case ["tree", int(nodes), int(depth), int(width)]:
                pass
            case _:
                raise ValueError(f"An arm must be known; got {name!r}; allowed: {SYNTAX}.")
        tree = {"draft_depth": depth, "draft_total_tokens": nodes, "draft_top_k": width}
        return cls(name, draft | {"draft_policy": "fixed"} | tree)

    def config(self, head: HeteroSpecHead, **kwargs: Any) -> HeteroSpecGenerationConfig:
        """The generation config of this arm, with the fields all arms share in `kwargs`."""
        draft = dict(self.draft or {})
        if self.tiers and head.policy is not None:
            draft["draft_tiers"] = [list(tier) for tier in head.policy.strata.with_tiers(**self.tiers).tiers]
        return HeteroSpecGenerationConfig(**kwargs, **draft, **self.generate)
