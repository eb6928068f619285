"""Linear layers on packed weights.

The CPU's matrix kernels want weights in a blocked layout and otherwise rearrange them on every call, which doubles
the time of a pass over few tokens. Here a weight is packed once and every graph reads the same copy. Layers that read
the same input (queries, keys and values; gate and up) become one.

There are two layouts (`Layout`), each with the kernels that are fastest for a few rows on its processors: in fp32 with
AVX2, 80 products of 1536 x 576 take 12.1 / 15.8 / 20.4 / 27.9 / 70.6 ms over 1 / 4 / 8 / 16 / 60 rows in blocks, and
11.5 / 13.2 / 15.1 / 21.6 / 63.2 in panels (two cores).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode

from ..machine import multiplies_bfloat16

ROWS_HINT = 16  # packing for so many rows gives the layout that is fastest for every number of rows from 1 on
PANEL = 16  # output features of a panel: two registers of AVX2

_library = torch.library.Library("hf_heterospec", "DEF")
_library.define("linear(Tensor input, Tensor weight, int out_features) -> Tensor")
_library.define("panel_linear(Tensor input, Tensor panels, int out_features) -> Tensor")


def _linear(input: Tensor, weight: Tensor, out_features: int) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(input, weight, None, "none", [], "")


def _linear_shape(input: Tensor, weight: Tensor, out_features: int) -> Tensor:
    return input.new_empty(*input.shape[:-1], out_features)


def _panel_linear(input: Tensor, panels: Tensor, out_features: int) -> Tensor:
    rows = input.reshape(-1, input.shape[-1])
    product = torch.bmm(rows.expand(panels.shape[0], *rows.shape), panels)  # [panels, rows, PANEL]
    product = product.transpose(0, 1).reshape(rows.shape[0], -1)[:, :out_features]
    return product.reshape(*input.shape[:-1], out_features)


_library.impl("linear", _linear, "CPU")
_library.impl("linear", _linear, "MkldnnCPU")
_library.impl("linear", _linear_shape, "Meta")
_library.impl("panel_linear", _panel_linear, "CompositeImplicitAutograd")  # inductor sees the product in it
packed_linear = torch.ops.hf_heterospec.linear.default
panel_linear = torch.ops.hf_heterospec.panel_linear.default


class Layout(Enum):
    """How a weight `[out, in]` is packed."""

    BLOCKS = "blocks"  # oneDNN's own: opaque, `[out, in]`
    PANELS = "panels"  # `[ceil(out / PANEL), in, PANEL]`, which inductor's generated kernels multiply


MULTIPLY = {Layout.BLOCKS: packed_linear, Layout.PANELS: panel_linear}  # (input, packed weight, out features)


def layout_for(device: torch.device, dtype: torch.dtype) -> Layout | None:
    """The layout in which weights of `dtype` are multiplied fastest on `device`; `None` for as they are."""
    if device.type != "cpu":
        return None
    if dtype == torch.float32:
        if torch.backends.cpu.get_cpu_capability() == "AVX2":
            return Layout.PANELS  # bf16 has no generated kernel there
        return Layout.BLOCKS if torch.backends.mkldnn.is_available() else None
    return Layout.BLOCKS if dtype == torch.bfloat16 and multiplies_bfloat16(device) else None


def pack(weights: Sequence[Tensor], layout: Layout) -> Tensor:
    """Weights `[out_i, in]`, one below the other, as one tensor packed in `layout`."""
    weight = torch.cat([weight.detach() for weight in weights]) if len(weights) > 1 else weights[0].detach()
    if layout is Layout.BLOCKS:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
    weight = pad(weight, (0, 0, 0, -weight.shape[0] % PANEL))
    return weight.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


class PackedLinears(TorchFunctionMode):
    """While active, `torch.nn.functional.linear` records `packed_linear`, for `fuse_linears` to find."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    @staticmethod
    def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = packed_linear(input, weight, weight.shape[0])
        return output if bias is None else output + bias


def fuse_linears(module: GraphModule, layout: Layout) -> list[tuple[Node, list[Node]]]:
    """Let each group of packed linears with one input read one weight packed in `layout` (mutates the graph).

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
        with graph.inserting_after(last):
            last = graph.placeholder(f"packed_{number}")
        last.meta["val"] = _packed_shape([weight.meta["val"] for weight in weights], layout)
        packed.append((last, weights))
        _replace(module, linears, source, last, layout)
    graph.lint()
    module.recompile()
    return packed


def _weight_of(node: Node) -> Node:
    return cast(Node, node.args[1])


def _packed_shape(weights: list[Tensor], layout: Layout) -> Tensor:
    out_features, in_features = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    if layout is Layout.BLOCKS:
        return weights[0].new_empty(out_features, in_features)
    return weights[0].new_empty(-(-out_features // PANEL), in_features, PANEL)


def _replace(module: GraphModule, linears: list[Node], source: Node, weight: Node, layout: Layout) -> None:
    graph = module.graph
    sizes = [_weight_of(node).meta["val"].shape[0] for node in linears]
    with graph.inserting_before(linears[0]):
        fused = graph.call_function(MULTIPLY[layout], (source, weight, sum(sizes)))
        fused.meta["val"] = _linear_shape(source.meta["val"], weight.meta["val"], sum(sizes))
        start = 0
        for node, size in zip(linears, sizes, strict=True):
            end = start + size
            part = fused
            if len(linears) > 1:
                part = graph.call_function(torch.ops.aten.slice.Tensor, (fused, -1, start, end))
                part.meta["val"] = fused.meta["val"][..., start:end]
            node.replace_all_uses_with(part)
            start = end
    for node in linears:
        graph.erase_node(node)
