"""Tensors from the GPU memory of one worker to that of another: files for small ones, CUDA's IPC for large ones.

A file of 6 GB takes 15 s to be written and read, the same copy within the GPU 5 ms. What is offered lies in memory of its own,
so that whoever opens it sees nothing else of this process (torch's allocator would put a secret beside it), and it is
copied at once: what the other side does to it later changes nothing. What it says of its size is not believed: the driver knows
how large the memory is. Source: CUDA driver API, ``cuIpcGetMemHandle`` and ``cuMemGetAddressRange``.

Small tensors, of which a network has hundreds, go together as one: each copy from the device by itself waits for it.

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

from mtmc_lsp.core.errors import HandoverFailed

LEAST_BYTES = 32 << 20
"""Smaller tensors go by file: that takes no time."""
PEER_ACCESS = 1
MARK = "offered in GPU memory"
PLACE, PACKED = "place in what is packed", "packed"
"""Of a tensor that lies among others its first byte; and the key of these, as bytes, beside that of the rest."""
ALIGNMENT = 512
"""Bytes; torch's own allocator gives no less."""

_offered: dict[str, list[int]] = {}
"""By file, the addresses of what is offered beside it."""


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``: it goes to the driver by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _Bytes:
    """Device memory as torch takes it over without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def export_(value: Any, path: str, *, in_memory: bool) -> None:
    """Leave mappings and lists of tensors for another process, which finds them by the file's path.

    Args:
        value: what holds the tensors.
        path: a file; what was offered under it before is withdrawn.
        in_memory: whether large CUDA tensors stay in GPU memory, offered by this process as long as it lives.
    """
    withdraw(path)
    packing = _Packing()
    if in_memory:
        value = _offering(value, path)
    content = _replaced(value, packing.add)
    packed = packing.bytes()
    if packed is not None:
        packed = (in_memory and is_large(packed) and _offer(packed, path)) or packed.cpu()
    torch.save({"content": content, PACKED: packed}, path)


def import_(path: str, device: str) -> Any:
    """What :func:`export_` left, as copies on ``device``; small tensors are parts of one.

    Raises:
        HandoverFailed: its memory cannot be opened here, is gone, or is smaller than what is said to be in it.
    """
    left = torch.load(path, weights_only=True, map_location=device)
    try:
        packed = _copied(left[PACKED]) if isinstance(left[PACKED], dict) else left[PACKED]
        return _opened(left["content"], packed)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HandoverFailed(f"what was left is nothing that is given here: {type(error).__name__}: {error}") from None


def withdraw(path: str) -> None:
    """Give the memory of what was offered under this path back; the file, which only says where that is, goes with it."""
    addresses = _offered.pop(path, [])
    for address in addresses:
        _driver().cuMemFree_v2(ctypes.c_uint64(address))
    if addresses:
        Path(path).unlink(missing_ok=True)


def is_large(value: Any) -> bool:
    """Whether a tensor in it, or all of them together, would be offered in memory."""
    return _cuda_bytes(value) >= LEAST_BYTES


def _cuda_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return _extent(value) * value.element_size() if value.is_cuda else 0
    if isinstance(value, (dict, list, tuple)):
        return sum(map(_cuda_bytes, value.values() if isinstance(value, dict) else value))
    return 0


def _replaced(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same with its tensors changed, but for those that say where another is."""
    if isinstance(value, dict):
        if MARK in value:
            return value
        return {key: _replaced(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(part, change) for part in value]
    return change(value) if isinstance(value, torch.Tensor) else value


def _offering(value: Any, path: str) -> Any:
    """The same with large tensors replaced by where they are; without room for them they stay."""
    return _replaced(value, lambda tensor: (is_large(tensor) and _offer(tensor, path)) or tensor)


class _Packing:
    """Tensors of one device in one, each with its own layout."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._end = 0
        self._gap = torch.empty(0)

    def add(self, tensor: torch.Tensor) -> Any:
        """Take a tensor in, and give what says where it is; what is elsewhere, or no plain memory, is given back."""
        if not self._parts:
            self._gap = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=tensor.device)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device != self._gap.device:
            return tensor
        if is_large(tensor):
            # There may be no room to have it twice.
            return tensor.detach().cpu()
        tensor = tensor.detach().resolve_conj().resolve_neg()
        part = _all_elements(tensor).view(torch.uint8)
        where = {PLACE: self._end, **_layout(tensor)}
        missing = -part.numel() % ALIGNMENT
        self._parts += [part, self._gap[:missing]]
        self._end += part.numel() + missing
        return where

    def bytes(self) -> torch.Tensor | None:
        """All of them; none where there are none."""
        return torch.cat(self._parts) if self._parts else None


def _layout(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }


def _offer(tensor: torch.Tensor, path: str) -> dict[str, Any] | None:
    size = _extent(tensor) * tensor.element_size()
    address, handle = ctypes.c_uint64(), _Handle()
    # Memory that torch holds back for later is not there for others.
    if torch.cuda.mem_get_info()[0] < size:
        torch.cuda.empty_cache()
    if _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)):
        return None
    _offered.setdefault(path, []).append(address.value)
    if _driver().cuIpcGetMemHandle(ctypes.byref(handle), address):
        return None
    _elements(address.value, size, tensor.dtype).copy_(_all_elements(tensor.detach()))
    torch.cuda.synchronize()
    return {
        MARK: base64.b64encode(bytes(handle.reserved)).decode(),
        **_layout(tensor),
    }


def _dtype(layout: dict[str, Any]) -> torch.dtype:
    found = getattr(torch, str(layout["dtype"]), None)
    if not isinstance(found, torch.dtype):
        raise HandoverFailed(f"there is no dtype {layout['dtype']}")
    return found


def _opened(value: Any, packed: torch.Tensor | None) -> Any:
    if isinstance(value, dict):
        if MARK in value:
            return _copied(value)
        if PLACE in value:
            return _unpacked(value, packed)
        return {key: _opened(part, packed) for key, part in value.items()}
    return [_opened(part, packed) for part in value] if isinstance(value, (list, tuple)) else value


def _unpacked(where: dict[str, Any], packed: torch.Tensor | None) -> torch.Tensor:
    """A tensor among those that were packed."""
    shape, stride, dtype, first = where["shape"], where["stride"], _dtype(where), where[PLACE]
    size = _reach(shape, stride) * dtype.itemsize
    is_bytes = isinstance(packed, torch.Tensor) and packed.dtype == torch.uint8 and packed.dim() == 1
    there = packed.numel() if packed is not None and is_bytes and packed.is_contiguous() else 0
    if packed is None or min(first, *shape, *stride, 0) < 0 or first % ALIGNMENT or first + size > there:
        raise HandoverFailed(f"a tensor of {size} bytes is said to lie at {first} of {there}")
    return packed[first : first + size].view(dtype).as_strided(shape, stride)


def _copied(offer: dict[str, Any]) -> torch.Tensor:
    shape, stride, dtype = offer["shape"], offer["stride"], _dtype(offer)
    if any(number < 0 for number in (*shape, *stride)):
        raise HandoverFailed(f"no tensor has the shape {shape} and the strides {stride}")
    size = _reach(shape, stride) * dtype.itemsize
    address, handle = ctypes.c_uint64(), _Handle()
    ctypes.memmove(ctypes.byref(handle), base64.b64decode(offer[MARK]), ctypes.sizeof(handle))
    failed = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, ctypes.c_uint(PEER_ACCESS))
    if failed:
        raise HandoverFailed(f"GPU memory of another process cannot be opened here (CUDA error {failed})")
    try:
        there = _bytes_from(address.value)
        if size > there:
            raise HandoverFailed(f"{size} bytes are offered in a piece of GPU memory that has {there}")
        fresh = torch.empty_strided(shape, stride, dtype=dtype, device="cuda")
        _all_elements(fresh).copy_(_elements(address.value, size, dtype))
        torch.cuda.synchronize()
    finally:
        _driver().cuIpcCloseMemHandle(address)
    return fresh


def _bytes_from(address: int) -> int:
    """How many bytes of one allocation follow an address."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    failed = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if failed:
        raise HandoverFailed(f"the size of another process's GPU memory cannot be told (CUDA error {failed})")
    return base.value + size.value - address


def _elements(address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory as a tensor of one dimension."""
    return torch.as_tensor(_Bytes(address, size), device="cuda").view(dtype)


def _all_elements(tensor: torch.Tensor) -> torch.Tensor:
    """What the tensor reads in the order of its memory, with what lies between: any layout is copied as it is."""
    return tensor.as_strided((_extent(tensor),), (1,))


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last that it reads, with what lies between."""
    return _reach(tensor.shape, tensor.stride())


def _reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The same of a tensor with this shape and these strides."""
    if not math.prod(shape):
        return 0
    return 1 + sum((int(size) - 1) * int(step) for size, step in zip(shape, stride, strict=True))


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
