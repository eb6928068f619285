"""Compiled passes at run time: bound to the user's weights, loaded or built beside the eager ones, used when ready."""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration import DraftCompile
from ..head import HeteroSpecHead
from ..policy.costs import Costs, read_costs
from . import packing
from .building import ARTEFACT, COSTS, MANIFEST, PASSES, GraphSpec, passes_of, write_whole

logger = logging.get_logger(__name__)

# Eager decoding that a (target, head) pair must have done before `auto` spends a second or a minute on it.
LOAD_AFTER_SECONDS, BUILD_AFTER_SECONDS = 0.5, 5.0
UPSTREAM_HOOKS = "transformers.utils.output_capturing"


class Graphs:
    """The compiled passes of one target and head.

    `run` may be called once `is_ready`; `status` says in one line what serves, and why.
    """

    def __init__(self, spec: GraphSpec) -> None:
        self.spec, self.status, self.is_ready = spec, "eager: not compiled yet", False
        self.eager_seconds = 0.0
        self.sizes: dict[str, list[tuple[int, int]]] = {}  # see `tracing.Traced`
        self.weights: dict[str, list[Tensor]] = {}  # what each pass reads besides its inputs
        self._process: subprocess.Popen[bytes] | None = None
        self._loader: threading.Thread | None = None
        self._artefacts: dict[str, Any] = {}
        self._bound_to: _WeightState | None = None

    @torch.no_grad()
    def run(self, name: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The pass called `name` (see `building.PASSES`), on the inputs of the module of that name in `tracing`.
        Writes to the cache tensors among them, which must be contiguous; the others are made so."""
        sizes = (inputs[number].shape[dimension] for number, dimension in self.sizes[name])
        return self._artefacts[name](*sizes, *(part.contiguous() for part in inputs), *self.weights[name])

    def prepare(self, model: PreTrainedModel, head: HeteroSpecHead, mode: DraftCompile) -> None:
        """Called once per call, before its first pass. Waits only when `mode` is `"always"`.

        Raises:
            ValueError: with `"always"`, when the passes cannot be compiled.
        """
        if mode == "always":
            self._build_now()
            if self._loader is not None:
                self._loader.join()
            if not self._artefacts:
                self._load()
        self._bind(model, head)
        if mode == "always" and not self.is_ready:
            raise ValueError(f"draft_compile='always', but the passes run {self.status}. Use 'auto' or 'never'.")

    @functools.cached_property
    def costs(self) -> Costs | None:
        """What rounds with these passes cost on this machine; `None` before the first `keep_costs`."""
        path = self.spec.folder / COSTS
        if not path.exists():
            return None
        try:
            return read_costs(path).get("compiled")
        except ValueError as error:
            logger.warning_once(f"Measured costs are left out. {error}")
            return None

    def keep_costs(self, costs: Costs) -> None:
        """Keep measured costs beside the artefacts; calls in this process and later ones decide by them."""
        write_whole(self.spec.folder / COSTS, json.dumps({"costs": {"compiled": costs.to_dict()}}, indent=1))
        self.costs = costs

    def count_eager(self, seconds: float) -> None:
        """A call is over that decoded for so long without compiled passes. When that adds up, have them built and
        loaded beside the calls that follow."""
        if self.is_ready or self._artefacts:
            return
        self.eager_seconds += seconds
        if self._process is not None and self._process.poll():
            self._fail(f"compiling failed ({self.spec.failure()}); see {self.spec.folder}")
        elif self.spec.is_built():
            if self._loader is None and self.eager_seconds > LOAD_AFTER_SECONDS:
                self._loader = threading.Thread(target=self._load, daemon=True)
                self._loader.start()
        elif self._process is None and self.eager_seconds > BUILD_AFTER_SECONDS:
            self._process = self.spec.start_build()
            atexit.register(self._process.kill)
            self.status = "eager: being compiled"

    def _build_now(self) -> None:
        if self.spec.is_built():
            return
        process = self._process or self.spec.start_build()
        with tqdm(total=len(PASSES), desc="compiling", unit="pass", file=sys.stderr, disable=None) as bar:
            while process.poll() is None:
                time.sleep(0.5)
                bar.update(len(self.spec.built_passes()) - bar.n)
            bar.update(len(self.spec.built_passes()) - bar.n)
        if process.returncode:
            self._fail(f"compiling failed ({self.spec.failure()}); see {self.spec.folder}")

    def _load(self) -> None:
        from torch._inductor import CompiledArtifact
        from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

        if not self.spec.is_built():
            return
        folder = self.spec.folder
        try:
            with temporary_cache_dir(str(folder / "inductor")):
                self._artefacts = {
                    name: CompiledArtifact.load(path=str(folder / ARTEFACT.format(name)), format="binary")
                    for name in PASSES
                }
        except Exception as error:  # a damaged file can raise anything; it is said, and eager passes serve
            self._fail(f"its artefacts cannot be loaded ({error!r}); delete {folder} to have them built again")

    def _bind(self, model: PreTrainedModel, head: HeteroSpecHead) -> None:
        """Bind artefacts to the weights as they are now; packs them again when they have changed."""
        if not self._artefacts:
            return
        head.to(device=model.device, dtype=model.dtype)
        state = _WeightState([tensor for module in (model, head) for tensor in _tensors_of(module).values()])
        if self._bound_to is not None and state.equals(self._bound_to):
            return
        from .tracing import kind_of

        modules = passes_of(model, head, self.spec.layer_ids)
        packed: dict[tuple[int, ...], Tensor] = {}
        for name in PASSES:
            manifest = json.loads((self.spec.folder / MANIFEST.format(name)).read_text())
            tensors = _tensors_of(modules[name])
            for part, kind in (
                (p, k) for entry in manifest["weights"] for p, k in zip(entry["names"], entry["kinds"], strict=True)
            ):
                found = kind_of(tensors[part]) if part in tensors else None
                if found != kind:
                    return self._fail(f"its weight {part} is {found}, where an unmodified model has {kind}")
            self.sizes[name] = manifest["sizes"]
            self.weights[name] = [_weight(entry, tensors, packed) for entry in manifest["weights"]]
        self._bound_to, self.is_ready, self.status = state, True, "compiled"

    def _fail(self, reason: str) -> None:
        self.is_ready, self.status = False, f"eager: {reason}"
        logger.warning_once(f"The target is not compiled: {reason}.")


_graphs: weakref.WeakKeyDictionary[nn.Module, dict[str, Graphs]] = weakref.WeakKeyDictionary()


def graphs_for(model: PreTrainedModel, head: HeteroSpecHead, mode: DraftCompile) -> tuple[Graphs | None, str]:
    """Compiled passes for one call, or `None`, and one line that says what serves."""
    if mode == "never":
        return None, "eager: draft_compile='never'"
    if reason := why_eager(model):
        if mode == "always":
            raise ValueError(f"draft_compile='always', but {reason}. Use draft_compile='auto' or 'never'.")
        return None, f"eager: {reason}"
    spec = GraphSpec.of(model, head)
    known = _graphs.setdefault(model, {})
    graphs = known.setdefault(str(spec.folder), Graphs(spec))
    graphs.prepare(model, head, mode)
    return graphs, graphs.status


def why_eager(model: PreTrainedModel) -> str | None:
    """Why passes over `model` cannot be compiled, in a few words; `None` when they can."""
    config = model.config.get_text_config(decoder=True)
    devices = {parameter.device for parameter in model.parameters()}
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    reasons = {
        "the model's code is not part of transformers": not type(model).__module__.startswith("transformers."),
        "the model is quantised": getattr(model, "is_quantized", False),
        "its weights are spread over several devices or offloaded": len(devices) != 1 or model.device.type == "meta",
        f"it runs on {model.device.type}": model.device.type not in ("cpu", "cuda"),
        f"it uses {config._attn_implementation} attention": config._attn_implementation not in ("sdpa", "eager"),
        "it has layers without full attention": not set(getattr(config, "layer_types", None) or ())
        <= {"full_attention"}
        or getattr(config, "sliding_window", None) is not None,
        "a hook is installed on it": any(getattr(hook, "__module__", None) != UPSTREAM_HOOKS for hook in hooks),
        "one of its modules has a forward of its own": any("forward" in vars(module) for module in model.modules()),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


class _WeightState:
    """Tells whether weights are still what they were. Writing through `.data` leaves a tensor's version alone, so a few
    values of each are compared too; the tensors are kept, so that their addresses are not given to others."""

    NUM_SAMPLES = 16

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self.places = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
        steps = [max(1, tensor.numel() // self.NUM_SAMPLES) for tensor in self.tensors]
        self.samples = torch.cat(
            [tensor.flatten()[::step].float() for tensor, step in zip(self.tensors, steps, strict=True)]
        )

    def equals(self, other: _WeightState) -> bool:
        return self.places == other.places and torch.equal(self.samples, other.samples)


def _weight(entry: dict[str, Any], tensors: dict[str, Tensor], packed: dict[tuple[int, ...], Tensor]) -> Tensor:
    parts = [tensors[name].detach() for name in entry["names"]]
    if entry["layout"] is None:
        return parts[0]
    key = tuple(part.data_ptr() for part in parts)
    if key not in packed:
        packed[key] = packing.pack(parts, packing.Layout(entry["layout"]))
    return packed[key]
