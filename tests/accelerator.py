"""An accelerator for tests, without one: its tensors live on the CPU, say that they are elsewhere, and count how often
the host waits for them.

What a device is asked to do runs on by itself until the host wants a value. Such waits are what a loop must spare, and
on a CPU nobody notices them. The host waits

* for a value: `tolist`, `int`, `bool`, `equal`;
* for a size that depends on values: `nonzero`, `masked_select`, masks as indices;
* for a copy from one to the other, unless it goes to the device with `non_blocking=True`.

As on CUDA, tensors of the host don't mix with those of the device, scalars excepted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")  # a device that every build knows, and none computes on
aten = torch.ops.aten
READS = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal)
INDEXES = (aten.index, aten.index_put, aten.index_put_)
COPIES = (aten._to_copy, aten.copy_)


class DeviceTensor(Tensor):
    """Says it is on `DEVICE`. Its values are in `host`."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        tensor = Tensor._make_wrapper_subclass(cls, host.shape, **layout, device=DEVICE)
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a tensor whose accelerator is off")


class Accelerator(TorchDispatchMode):
    """While active, computes on `DEVICE`. `waits` counts by operation what the host waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._functions = _Functions(self.waits)

    def __enter__(self) -> Accelerator:
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._functions.__exit__(*details)

    @property
    def num_waits(self) -> int:
        return self.waits.total()

    def take(self, module: nn.Module) -> None:
        """Move a module's weights to the device."""
        for part in module.modules():
            for name, weight in part.named_parameters(recurse=False):
                part._parameters[name] = nn.Parameter(DeviceTensor(weight.detach()), requires_grad=False)
            for name, buffer in part.named_buffers(recurse=False):
                part._buffers[name] = DeviceTensor(buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = {id(leaf.host): leaf for leaf in inputs if isinstance(leaf, DeviceTensor)}
        to_device = bool(on_device) if (target := kwargs.get("device")) is None else target.type == DEVICE.type
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        if func.overloadpacket in COPIES:
            crosses = len({isinstance(leaf, DeviceTensor) for leaf in inputs} | {to_device}) > 1
            waits = crosses and not (to_device and (kwargs.get("non_blocking") or args[2:] == (True,)))
        else:
            waits = bool(on_device) and (func.overloadpacket in READS or _indexes_by_mask(func, args))
            assert not on_device or all(isinstance(leaf, DeviceTensor) or leaf.dim() == 0 for leaf in inputs), func
        self.waits[func.overloadpacket.__name__] += waits
        result = func(*tree_map(_host_of, args), **tree_map(_host_of, kwargs))
        if not to_device:
            return result

        def on_device_again(leaf: Any) -> Any:
            if id(leaf) in on_device:  # an operation in place returns what it was given
                return on_device[id(leaf)]
            return DeviceTensor(leaf) if isinstance(leaf, Tensor) else leaf

        return tree_map(on_device_again, result)


class _Functions(TorchFunctionMode):
    """What never gets as far as a dispatch mode: tensors made of numbers, and the way back."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == DEVICE.type:
            self.waits["tensor"] += 1
            return DeviceTensor(torch.tensor(*args, **kwargs | {"device": "cpu"}))
        if func in (Tensor.tolist, Tensor.new_tensor) and isinstance(args[0], DeviceTensor):
            self.waits[func.__name__] += 1
            result = func(args[0].host, *args[1:], **kwargs)
            return DeviceTensor(result) if isinstance(result, Tensor) else result
        return func(*args, **kwargs)


def _host_of(leaf: Any) -> Any:
    return leaf.host if isinstance(leaf, DeviceTensor) else leaf


def _indexes_by_mask(func: Any, args: Any) -> bool:
    return func.overloadpacket in INDEXES and any(index is not None and index.dtype is torch.bool for index in args[1])
