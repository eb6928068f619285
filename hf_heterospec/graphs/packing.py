"""Linear layers on packed weights.

The CPU's matrix kernels want weights in a blocked layout and otherwise rearrange them on every call, which doubles
the time of a pass over few tokens. Here a weight is packed once and every graph reads the same copy. Layers that read
the same input (queries, keys and values; gate and up) become one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from ..machine import multiplies_bfloat16

ROWS_HINT = 16  # packing for so many rows gives the layout that is fastest for every number of rows from 1 on

_library = torch.library.Library("hf_heterospec", "DEF")
_library.define("linear(Tensor input, Tensor weight) -> Tensor")


def _linear(input: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(input, weight, None, "none", [], "")


def _linear_shape(input: Tensor, weight: Tensor) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


_library.impl("linear", _linear, "CPU")
_library.impl("linear", _linear, "MkldnnCPU")
_library.impl("linear", _linear_shape, "Meta")
packed_linear = torch.ops.hf_heterospec.linear.default


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine has packed kernels for weights of `dtype` on `device`."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bfloat16(device))


def pack(weights: Sequence[Tensor]) -> Tensor:
    """Weights `[out_i, in]`, one below the other, as one opaque packed tensor `[sum of out_i, in]`."""
    weight = torch.cat([weight.detach() for weight in weights]) if len(weights) > 1 else weights[0].detach()
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)


class PackedLinears(TorchFunctionMode):
    """While active, `torch.nn.functional.linear` records `packed_linear`, for `fuse_linears` to find."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    @staticmethod
    def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = packed_linear(input, weight)
        return output if bias is None else output + bias


def fuse_linears(module: GraphModule) -> list[tuple[Node, list[Node]]]:
    """Let each group of packed linears with one input read one packed weight (mutates the graph).

    Returns:
        New placeholders, in order, behind all others, and for each the placeholders of the weights it is packed from.
    """
    graph = module.graph
    groups: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.target is packed_linear:
            groups.setdefault(cast(Node, node.args[0]), []).append(node)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    packed = []
    for number, (source, linears) in enumerate(groups.items()):
        weights = [_weight_of(node) for node in linears]
        values = [weight.meta["val"] for weight in weights]
        with graph.inserting_after(last):
            last = graph.placeholder(f"packed_{number}")
        last.meta["val"] = values[0].new_empty(sum(value.shape[0] for value in values), values[0].shape[1])
        packed.append((last, weights))
        _replace(module, linears, source, last)
    graph.lint()
    module.recompile()
    return packed


def _weight_of(node: Node) -> Node:
    return cast(Node, node.args[1])


def _replace(module: GraphModule, linears: list[Node], source: Node, weight: Node) -> None:
    graph = module.graph
    with graph.inserting_before(linears[0]):
        fused = graph.call_function(packed_linear, (source, weight))
        fused.meta["val"] = _linear_shape(source.meta["val"], weight.meta["val"])
        start = 0
        for node in linears:
            end = start + _weight_of(node).meta["val"].shape[0]
            part = fused
            if len(linears) > 1:
                part = graph.call_function(torch.ops.aten.slice.Tensor, (fused, -1, start, end))
                part.meta["val"] = fused.meta["val"][..., start:end]
            node.replace_all_uses_with(part)
            start = end
    for node in linears:
        graph.erase_node(node)
