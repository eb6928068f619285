"""`policy.json`: what was fitted, for which head, on what; loading, saving and sharing it.

A head's repository carries its policy as one more file. A policy can also live in a repository of its own and point
to somebody else's head, by repository id and revision.

    {
      "format": "heterospec-policy", "schema": 1,
      "head":        {"fingerprint": ..., "repo_id": ..., "revision": ...},
      "quantifier":  how H(P*) is computed,
      "paper":       cuts, tiers and the base tree they belong to,
      "throughput":  patience, nodes_per_level, calibration,
      "costs":       of one machine, for eager and compiled passes; everything above holds on any,
      "provenance":  what it was fitted on
    }
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers.utils import PushToHubMixin, cached_file

from .costs import Costs
from .entropy import Quantifier
from .rounds import FixedRounds, RoundPolicy
from .stratification import Strata
from .throughput import ThroughputRule

FILE_NAME = "policy.json"
PASSES = ("eager", "compiled")
FORMAT, SCHEMA = "heterospec-policy", 1


class PolicyMismatchError(ValueError):
    """The policy was fitted for another head, width or depth than it is asked to serve."""


@dataclass(frozen=True)
class HeadReference:
    """Which head a policy belongs to.

    Attributes:
        fingerprint: of its weights (`HeteroSpecHead.fingerprint`).
        repo_id, revision: where to find it, when it is not in the policy's own repository.
    """

    fingerprint: str
    repo_id: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class StratificationPolicy(PushToHubMixin):
    """Everything fitted for one head: the paper's strata, the throughput rule, and the costs of a machine.

    Attributes:
        head: the head it belongs to.
        strata: the paper's policy.
        throughput: the throughput rule.
        costs: of the machine it runs on, for `"eager"` and for `"compiled"` passes, or for one of them.
        provenance: what it was fitted on, for people.

    Example:
        >>> policy = StratificationPolicy.from_pretrained("folder-or-repo")
        >>> head.policy = policy.with_costs(measure_all_costs(model, head))
    """

    head: HeadReference
    strata: Strata
    throughput: ThroughputRule
    costs: Mapping[str, Costs]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.costs or not set(self.costs) <= set(PASSES):
            raise ValueError(
                f"`costs` must be given for one or both of {', '.join(PASSES)} passes; got {sorted(self.costs)}. "
                "Measure them with `heterospec fit-policy --only-costs`."
            )

    def with_costs(self, costs: Mapping[str, Costs]) -> StratificationPolicy:
        """The same policy on a machine with these costs."""
        return replace(self, costs=costs)

    def costs_of(self, passes: str, *, measured: Costs | None = None) -> Costs:
        """Costs of `"eager"` or `"compiled"` passes; of the other kind where only that was measured. Where the policy's
        are of another machine than those `measured` for these passes, the latter count."""
        own = self.costs[passes] if passes in self.costs else next(iter(self.costs.values()))
        return own if measured is None or own.machine == measured.machine else measured

    def rounds(
        self,
        name: str,
        *,
        depth: int,
        top_k: int,
        num_nodes: int,
        device: str,
        passes: str = "eager",
        measured: Costs | None = None,
        tiers: Sequence[Sequence[int]] | None = None,
    ) -> RoundPolicy:
        """The policy called `name` for one call of `generate`.

        Args:
            name: `"paper"`, `"throughput"` or `"fixed"`.
            depth, num_nodes: the base tree of `"paper"` and `"fixed"`; bounds to `"throughput"`.
            top_k: width of the beam.
            device: type of the target's device.
            passes: `"eager"` or `"compiled"`, for the costs.
            measured: costs of these passes that were measured on this machine, as for `costs_of`.
            tiers: (depth, nodes) pairs for `"paper"` instead of the fitted ones.

        Raises:
            PolicyMismatchError: when the fit does not hold for this width, depth or device.
            ValueError: when there are more `tiers` than cuts.
        """
        if name == "fixed":
            return FixedRounds(depth + 1, num_nodes)
        fitted = self.strata.top_k if name == "paper" else self.throughput.calibration.top_k
        if top_k != fitted:
            raise PolicyMismatchError(f"The policy was fitted for draft_top_k={fitted}; got {top_k}.")
        if name == "paper":
            if (depth, num_nodes) != (self.strata.depth, self.strata.num_nodes):
                raise PolicyMismatchError(
                    f"The strata were fitted for draft_depth={self.strata.depth} and draft_total_tokens="
                    f"{self.strata.num_nodes}; got {depth} and {num_nodes}. Cuts do not transfer between depths."
                )
            return (self.strata if tiers is None else self.strata.with_trees(tiers)).rounds()
        costs = self.costs_of(passes, measured=measured)
        if costs.device not in (None, device):
            raise PolicyMismatchError(
                f"Costs were measured on {costs.device}; the target is on {device}. Measure them there "
                "with `heterospec compile`, or `head.policy = head.policy.with_costs(measure_all_costs(model, head))`."
            )
        return self.throughput.rounds(costs, max_levels=depth + 1, max_nodes=num_nodes)

    # files

    def to_dict(self) -> dict[str, Any]:
        """The content of `policy.json`."""
        return {
            "format": FORMAT,
            "schema": SCHEMA,
            "head": asdict(self.head),
            "quantifier": asdict(self.strata.quantifier),
            "paper": self.strata.to_dict(),
            "throughput": self.throughput.to_dict(),
            "costs": {passes: costs.to_dict() for passes, costs in self.costs.items()},
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StratificationPolicy:
        """What `to_dict` gives.

        Raises:
            ValueError: for an unknown format or schema, missing fields, and values that cannot be.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ValueError(f"`format` must be {FORMAT!r}; this is no policy. Fit one with `heterospec fit-policy`.")
        if data.get("schema") != SCHEMA:
            raise ValueError(
                f"`schema` must be {SCHEMA}; got {data.get('schema')!r}. Upgrade hf_heterospec, or fit again."
            )
        try:
            paper, quantifier = data["paper"], Quantifier(**data["quantifier"])
            return cls(
                head=HeadReference(**data["head"]),
                strata=Strata.from_dict(paper, quantifier=quantifier),
                throughput=ThroughputRule.from_dict(data["throughput"]),
                costs={passes: Costs.from_dict(costs) for passes, costs in data["costs"].items()},
                provenance=data.get("provenance", {}),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"policy.json must hold head, quantifier, paper, throughput and costs; got {error!r}. Fit it again."
            ) from error

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write `policy.json` into a folder, which is made if need be."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        (folder / FILE_NAME).write_text(_compact_numbers(text) + "\n")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> StratificationPolicy:
        """Load from a folder or a Hub repository.

        Args:
            pretrained_model_name_or_path: folder or repository id.
            kwargs: `revision`, `token`, `cache_dir`, `local_files_only` and the like.

        Raises:
            OSError: when there is no `policy.json`.
            ValueError: when it is not a policy, or not a sound one.
        """
        path = cached_file(pretrained_model_name_or_path, FILE_NAME, **kwargs)
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except ValueError as error:
            raise ValueError(f"{pretrained_model_name_or_path}/{FILE_NAME}: {error}") from error


def _compact_numbers(text: str) -> str:
    """Lists of numbers on one line."""
    return re.sub(r"\[[\s\d.,eE+-]*\]", lambda found: re.sub(r"\s+", "", found.group()).replace(",", ", "), text)
