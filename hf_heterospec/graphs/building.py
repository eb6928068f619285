"""Compiled artefacts on disk: what identifies them, and the process that makes them.

A build needs no weights: it makes an empty copy of target and head from their configs, traces the passes and lets
inductor compile them. Everything the result depends on is hashed into the folder's name, so that a stale artefact is
never found.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedModel

from ..configuration import HeteroSpecConfig
from ..head import HeteroSpecHead
from . import packing

if TYPE_CHECKING:  # it takes a second to import, which only a build and a binding need
    from .tracing import Shapes, Traced

PASSES = ("target", "read", "expand")
COMPUTES = ("building", "packing", "tracing")  # modules here that an artefact depends on
MANIFEST, ARTEFACT, LOG, SPEC, COSTS = "{}.json", "{}.bin", "build.log", "spec.json", "costs.json"


@dataclass(frozen=True)
class GraphSpec:
    """Everything compiled passes depend on. Equal specs may share artefacts."""

    model_class: str  # module:name
    model_config: dict[str, Any]
    head_config: dict[str, Any]
    attention: str
    layer_ids: list[int]
    dtype: str
    layout: str | None  # of packed weights, a `packing.Layout`
    device: str
    num_threads: int
    versions: dict[str, str]
    sources: str  # hash of the code that computes: the model's, the head's and this package's
    machine: str

    @classmethod
    def of(cls, model: PreTrainedModel, head: HeteroSpecHead) -> GraphSpec:
        model_class = type(model)
        layout = packing.layout_for(model.device, model.dtype)
        return cls(
            model_class=f"{model_class.__module__}:{model_class.__qualname__}",
            model_config=_plain_config(model.config),
            head_config=_plain_config(head.config),
            attention=model.config._attn_implementation,
            layer_ids=head.layers_of(model),
            dtype=str(model.dtype).removeprefix("torch."),
            layout=layout.value if layout else None,
            device=model.device.type,
            num_threads=torch.get_num_threads(),
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
            sources=_hash_sources(str(inspect.getsourcefile(model_class))),
            machine=_describe_processor(model.device),
        )

    @property
    def folder(self) -> Path:
        """Where the artefacts of this spec are, or would be."""
        text = json.dumps(asdict(self), sort_keys=True)
        return Path(HF_HOME) / "hf_heterospec" / "graphs" / hashlib.sha256(text.encode()).hexdigest()[:24]

    def is_built(self) -> bool:
        return all((self.folder / MANIFEST.format(name)).exists() for name in PASSES)

    def start_build(self) -> subprocess.Popen[bytes]:
        """Start a process that builds what is missing, at the lowest priority. Its output goes to `build.log`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / SPEC, json.dumps(asdict(self), indent=1))
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "OMP_NUM_THREADS": str(self.num_threads),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, "-m", "hf_heterospec.graphs.building", str(self.folder / SPEC)]
        if os.name == "posix":
            command = ["nice", "-n", "19", *command]
        with open(self.folder / LOG, "wb") as log:
            # In the folder, since `-m` imports from where it runs.
            return subprocess.Popen(
                command, env=environment, cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def built_passes(self) -> list[str]:
        return [name for name in PASSES if (self.folder / MANIFEST.format(name)).exists()]

    def failure(self) -> str:
        """The last line a failed build wrote."""
        lines = (self.folder / LOG).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"


def build(spec: GraphSpec, folder: Path) -> Iterator[str]:
    """Compile every pass that `folder` lacks, and yield its name when it is there."""
    from . import tracing

    mode = tracing.new_mode()
    device, dtype = torch.device(spec.device), getattr(torch, spec.dtype)
    torch.set_num_threads(spec.num_threads)
    shapes = tracing.Shapes(mode, device=device, dtype=dtype)
    layout = packing.Layout(spec.layout) if spec.layout else None
    with mode, torch.device(device):
        model, head = _empty_target(spec, dtype), _empty_head(spec, dtype)
        for name in PASSES:
            if (folder / MANIFEST.format(name)).exists():
                continue
            module, inputs = passes_of(model, head, spec.layer_ids, shapes=shapes)[name]
            traced = tracing.trace(module, inputs, layout=layout)
            _compile(traced, layout, device, folder / ARTEFACT.format(name))
            write_whole(folder / MANIFEST.format(name), json.dumps({"sizes": traced.sizes, "weights": traced.weights}))
            yield name


def passes_of(
    model: PreTrainedModel, head: HeteroSpecHead, layer_ids: list[int], *, shapes: Shapes | None = None
) -> dict[str, Any]:
    """The passes as modules, by name; with `shapes`, each beside its fake inputs."""
    from . import tracing

    embeddings = model.get_input_embeddings()
    modules = {
        "target": tracing.TargetPass(model, layer_ids),
        "read": tracing.ReadPass(head, embeddings),
        "expand": tracing.ExpandPass(head, embeddings),
    }
    if shapes is None:
        return modules
    inputs = {
        "target": shapes.target_inputs(model),
        "read": shapes.read_inputs(head),
        "expand": shapes.expand_inputs(head),
    }
    return {name: (modules[name], inputs[name]) for name in PASSES}


def _compile(traced: Traced, layout: packing.Layout | None, device: torch.device, path: Path) -> None:
    from torch._inductor import standalone_compile

    patches: dict[str, Any] = {"size_asserts": False}  # a packed weight is opaque: it has a size, but no strides
    if device.type == "cuda":
        patches |= {"max_autotune": True}
    if layout is packing.Layout.PANELS:
        patches |= {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}
    with torch.no_grad():
        artefact = standalone_compile(
            traced.graph, [*traced.inputs], dynamic_shapes="from_graph", options={"config_patches": patches}
        )
    artefact.save(path=str(path), format="binary")


def _empty_target(spec: GraphSpec, dtype: torch.dtype) -> PreTrainedModel:
    from . import tracing

    module, name = spec.model_class.split(":")
    model_class = getattr(importlib.import_module(module), name)
    config = model_class.config_class.from_dict(spec.model_config)
    attention = tracing.GROUPED_ATTENTION if spec.attention == "sdpa" else spec.attention
    return model_class._from_config(config, dtype=dtype, attn_implementation=attention).eval()


def _empty_head(spec: GraphSpec, dtype: torch.dtype) -> HeteroSpecHead:
    return HeteroSpecHead._from_config(HeteroSpecConfig.from_dict(spec.head_config), dtype=dtype).eval()


def _plain_config(config: Any) -> dict[str, Any]:
    ignored = ("_name_or_path", "transformers_version", "dtype", "architectures")
    return {
        name: value for name, value in json.loads(config.to_json_string(use_diff=False)).items() if name not in ignored
    }


@functools.cache
def _hash_sources(model_file: str) -> str:
    package = Path(__file__).parent
    ours = [package.parent / f"{name}.py" for name in ("head", "beam")] + [package / f"{name}.py" for name in COMPUTES]
    files = [Path(model_file), *ours]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@functools.cache
def _describe_processor(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    flags = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def main(spec_path: str) -> None:
    """Build what the spec in that file asks for."""
    fields = json.loads(Path(spec_path).read_text())
    for name in build(GraphSpec(**fields), Path(spec_path).parent):
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
