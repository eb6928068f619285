"""What a benchmark compares. An arm is a name and the arguments it adds to `generate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..configuration import DraftCompile, HeteroSpecGenerationConfig

STOCK, PLAIN = "stock", "plain-compiled"
DEFAULT_ARMS = (STOCK, "prompt-lookup", PLAIN, "chain-5", "tree-60-5-10", "tree-16-1-10")
SYNTAX = (
    "stock, prompt-lookup, plain-eager, plain-compiled, throughput, paper, chain-DEPTH, or tree-NODES-DEPTH-WIDTH "
    "as in tree-60-5-10"
)


@dataclass(frozen=True)
class Arm:
    """One way of decoding.

    Attributes:
        name: see `SYNTAX`.
        draft: `draft_*` fields; `None` for arms that run without the head.
        generate: further arguments of `generate`.
    """

    name: str
    draft: dict[str, Any] | None = None
    generate: dict[str, Any] = field(default_factory=dict)

    @property
    def speculates(self) -> bool:
        return self.name not in (STOCK, PLAIN, "plain-eager")

    @classmethod
    def parse(cls, name: str, *, compile: DraftCompile = "always") -> Arm:
        """The arm called `name`. `compile` is what arms with a head get, `plain-eager` excepted.

        Raises:
            ValueError: for a name that is no arm.
        """
        kind, *numbers = name.split("-") if name[:4] in ("tree", "chai") else [name]
        try:
            sizes = [int(number) for number in numbers]
        except ValueError:
            sizes = []
        if name == STOCK:
            return cls(name)
        if name == "prompt-lookup":
            return cls(name, generate={"prompt_lookup_num_tokens": 10})
        if name == "plain-eager":
            return cls(name, draft={"draft_policy": "off", "draft_compile": "never"})
        if name == PLAIN:
            return cls(name, draft={"draft_policy": "off", "draft_compile": compile})
        if name in ("throughput", "paper"):
            return cls(name, draft={"draft_policy": name, "draft_compile": compile})
        if kind == "chain" and len(sizes) == 1:
            depth, nodes, width = sizes[0] - 1, sizes[0] + 1, 1
        elif kind == "tree" and len(sizes) == 3:
            nodes, depth, width = sizes
        else:
            raise ValueError(f"An arm must be known; got {name!r}; allowed: {SYNTAX}.")
        tree = {"draft_depth": depth, "draft_total_tokens": nodes, "draft_top_k": width}
        return cls(name, draft={"draft_policy": "fixed", "draft_compile": compile} | tree)

    def config(self, **kwargs: Any) -> HeteroSpecGenerationConfig:
        """The generation config of this arm, with the fields all arms share in `kwargs`."""
        return HeteroSpecGenerationConfig(**kwargs, **(self.draft or {}), **self.generate)
