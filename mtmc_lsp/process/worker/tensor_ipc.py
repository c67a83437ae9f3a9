"""Moves tensors between workers: small ones through files, large ones through CUDA IPC.

Writing and reading a file of 6 GB takes 15 s; the same copy within the GPU takes 5 ms. Shared tensors are copied to separate
allocations: torch's allocator could place a secret in the same allocation, and the receiver can open all of it. The receiver
copies at once, so later changes by the sender have no effect. The receiver does not trust the sender's sizes; the driver knows
the size of the allocation. Source: CUDA driver API, ``cuIpcGetMemHandle`` and ``cuMemGetAddressRange``.

Small tensors, of which a network has hundreds, are packed into one: each separate copy from the device would synchronise.

Runs in workers.
"""

from __future__ import annotations

import base64
import ctypes
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.core.errors import TensorSharingFailed

MIN_SHARED_BYTES = 32 << 20
"""Smaller tensors go through files, which is fast enough."""
PEER_ACCESS = 1
HANDLE = "CUDA IPC handle"
"""Key that marks the description of a shared tensor."""
OFFSET = "offset in packed bytes"
"""Key that marks the description of a packed tensor."""
PACKED = "packed"
"""Key of the packed bytes in the file."""
ALIGNMENT = 512
"""Bytes; that of torch's allocator."""

_shared: dict[str, list[int]] = {}
"""For each file the addresses of the allocations that it describes."""


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _Bytes:
    """Device memory that torch wraps without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def export_(value: Any, path: str, *, in_memory: bool) -> None:
    """Share mappings and lists of tensors with another process under the path of a file.

    Args:
        path: the file to write; memory that was shared under this path before is released.
        in_memory: whether to share large CUDA tensors in GPU memory, which lasts as long as this process.
    """
    release(path)
    packing = _Packing()
    if in_memory:
        value = _share_large(value, path)
    content = _map_tensors(value, packing.add)
    packed = packing.bytes()
    if packed is not None:
        packed = (in_memory and is_large(packed) and _share(packed, path)) or packed.cpu()
    torch.save({"content": content, PACKED: packed}, path)


def import_(path: str, device: str) -> Any:
    """Copies on ``device`` of the tensors that :func:`export_` shared; small tensors are views of one.

    Raises:
        TensorSharingFailed: the memory cannot be opened or is too small for the tensors, or the file is malformed.
    """
    file = torch.load(path, weights_only=True, map_location=device)
    try:
        packed = _copy_shared(file[PACKED]) if isinstance(file[PACKED], dict) else file[PACKED]
        return _open(file["content"], packed)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TensorSharingFailed(f"the shared file is malformed: {type(error).__name__}: {error}") from None


def release(path: str) -> None:
    """Release the GPU memory that was shared under this path, and delete the file that describes it."""
    addresses = _shared.pop(path, [])
    for address in addresses:
        _driver().cuMemFree_v2(ctypes.c_uint64(address))
    if addresses:
        Path(path).unlink(missing_ok=True)


def is_large(value: Any) -> bool:
    """Whether the CUDA tensors in ``value`` are large enough to share in GPU memory."""
    return _cuda_bytes(value) >= MIN_SHARED_BYTES


def _cuda_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return _extent(value) * value.element_size() if value.is_cuda else 0
    if isinstance(value, (dict, list, tuple)):
        return sum(map(_cuda_bytes, value.values() if isinstance(value, dict) else value))
    return 0


def _map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure with ``change`` applied to each tensor; descriptions of shared tensors stay."""
    if isinstance(value, dict):
        if HANDLE in value:
            return value
        return {key: _map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_tensors(part, change) for part in value]
    return change(value) if isinstance(value, torch.Tensor) else value


def _share_large(value: Any, path: str) -> Any:
    """The same structure with descriptions of large tensors; tensors for which the GPU has no room stay."""
    return _map_tensors(value, lambda tensor: (is_large(tensor) and _share(tensor, path)) or tensor)


class _Packing:
    """Packs tensors of one device into one, and keeps the layout of each."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._end = 0
        self._gap = torch.empty(0)

    def add(self, tensor: torch.Tensor) -> Any:
        """Pack a tensor and return its description; tensors on another device or without plain strides are returned."""
        if not self._parts:
            self._gap = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=tensor.device)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device != self._gap.device:
            return tensor
        if is_large(tensor):
            # The GPU may have no room for a second copy.
            return tensor.detach().cpu()
        tensor = tensor.detach().resolve_conj().resolve_neg()
        part = _all_elements(tensor).view(torch.uint8)
        description = {OFFSET: self._end, **_layout(tensor)}
        padding = -part.numel() % ALIGNMENT
        self._parts += [part, self._gap[:padding]]
        self._end += part.numel() + padding
        return description

    def bytes(self) -> torch.Tensor | None:
        """All packed tensors; ``None`` without any."""
        return torch.cat(self._parts) if self._parts else None


def _layout(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }


def _share(tensor: torch.Tensor, path: str) -> dict[str, Any] | None:
    size = _extent(tensor) * tensor.element_size()
    address, handle = ctypes.c_uint64(), _Handle()
    # Memory in torch's cache is not available to cuMemAlloc.
    if torch.cuda.mem_get_info()[0] < size:
        torch.cuda.empty_cache()
    if _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)):
        return None
    _shared.setdefault(path, []).append(address.value)
    if _driver().cuIpcGetMemHandle(ctypes.byref(handle), address):
        return None
    _elements(address.value, size, tensor.dtype).copy_(_all_elements(tensor.detach()))
    torch.cuda.synchronize()
    return {
        HANDLE: base64.b64encode(bytes(handle.reserved)).decode(),
        **_layout(tensor),
    }


def _dtype(layout: dict[str, Any]) -> torch.dtype:
    dtype = getattr(torch, str(layout["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise TensorSharingFailed(f"unknown dtype {layout['dtype']}")
    return dtype


def _open(value: Any, packed: torch.Tensor | None) -> Any:
    if isinstance(value, dict):
        if HANDLE in value:
            return _copy_shared(value)
        if OFFSET in value:
            return _unpack(value, packed)
        return {key: _open(part, packed) for key, part in value.items()}
    return [_open(part, packed) for part in value] if isinstance(value, (list, tuple)) else value


def _unpack(description: dict[str, Any], packed: torch.Tensor | None) -> torch.Tensor:
    """A view of one of the packed tensors."""
    shape, stride = description["shape"], description["stride"]
    dtype, first = _dtype(description), description[OFFSET]
    size = _reach(shape, stride) * dtype.itemsize
    is_bytes = isinstance(packed, torch.Tensor) and packed.dtype == torch.uint8 and packed.dim() == 1
    available = packed.numel() if packed is not None and is_bytes and packed.is_contiguous() else 0
    if packed is None or min(first, *shape, *stride, 0) < 0 or first % ALIGNMENT or first + size > available:
        raise TensorSharingFailed(f"a tensor of {size} bytes at {first} exceeds the {available} packed bytes")
    return packed[first : first + size].view(dtype).as_strided(shape, stride)


def _copy_shared(description: dict[str, Any]) -> torch.Tensor:
    shape, stride, dtype = description["shape"], description["stride"], _dtype(description)
    if any(number < 0 for number in (*shape, *stride)):
        raise TensorSharingFailed(f"invalid shape {shape} or strides {stride}")
    size = _reach(shape, stride) * dtype.itemsize
    address, handle = ctypes.c_uint64(), _Handle()
    ctypes.memmove(ctypes.byref(handle), base64.b64decode(description[HANDLE]), ctypes.sizeof(handle))
    error = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, ctypes.c_uint(PEER_ACCESS))
    if error:
        raise TensorSharingFailed(f"GPU memory of another process cannot be opened here (CUDA error {error})")
    try:
        available = _bytes_from(address.value)
        if size > available:
            raise TensorSharingFailed(f"a tensor of {size} bytes exceeds the shared allocation of {available} bytes")
        fresh = torch.empty_strided(shape, stride, dtype=dtype, device="cuda")
        _all_elements(fresh).copy_(_elements(address.value, size, dtype))
        torch.cuda.synchronize()
    finally:
        _driver().cuIpcCloseMemHandle(address)
    return fresh


def _bytes_from(address: int) -> int:
    """Bytes from an address to the end of its allocation."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    error = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if error:
        raise TensorSharingFailed(f"the size of another process's GPU memory is unknown (CUDA error {error})")
    return base.value + size.value - address


def _elements(address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Device memory as a one-dimensional tensor; ``size`` in bytes."""
    return torch.as_tensor(_Bytes(address, size), device="cuda").view(dtype)


def _all_elements(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory from its first to its last element in memory order, so that any layout can be copied."""
    return tensor.as_strided((_extent(tensor),), (1,))


def _extent(tensor: torch.Tensor) -> int:
    """Number of elements from the first to the last in memory, gaps included."""
    return _reach(tensor.shape, tensor.stride())


def _reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """As :func:`_extent` for a shape and strides."""
    if not math.prod(shape):
        return 0
    return 1 + sum((int(size) - 1) * int(step) for size, step in zip(shape, stride, strict=True))


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
