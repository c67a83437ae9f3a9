"""Reads numbers of many tensors from the device at once. Runs in workers.

Each read waits for the device. If several processes share a GPU, it also waits for the next time slice, which takes
milliseconds. A network has hundreds of tensors, so separate reads for each case would take minutes per candidate. Each operation
on a tensor is a launch, too, so the memory of many tensors is compared at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

Name = TypeVar("Name", bound=Hashable)
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Integers as which memory is compared, the widest first."""
MOST_JOINED = 1 << 28
"""Limit for the bytes of tensors on a GPU that are joined for a comparison."""


def numbers(scalars: Sequence[torch.Tensor]) -> list[float]:
    """The values of single-element tensors, with one read per device."""
    values = [0.0] * len(scalars)
    indices_of: dict[torch.device, list[int]] = {}
    for i, scalar in enumerate(scalars):
        indices_of.setdefault(scalar.device, []).append(i)
    for indices in indices_of.values():
        stacked = torch.stack([scalars[i].detach().reshape(()).to(torch.float64) for i in indices])
        for i, value in zip(indices, stacked.tolist(), strict=True):
            values[i] = float(value)
    return values


def unequal(pairs: Mapping[Name, tuple[torch.Tensor, torch.Tensor]]) -> set[Name]:
    """The names of pairs that are not equal; NaN equals NaN."""
    other_types = {name for name, (a, b) in pairs.items() if a.shape != b.shape or a.dtype != b.dtype}
    candidates = [name for name in pairs if name not in other_types]
    candidates = _not_identical({name: pairs[name] for name in candidates})
    # Almost all pairs are equal without NaN, so only the others get the more expensive comparison.
    values = {name: tuple(map(computable, pairs[name])) for name in candidates}
    candidates = _flagged(candidates, ((a != b).any() for a, b in values.values()))
    return other_types | set(_flagged(candidates, (_differ(*values[name]).any() for name in candidates)))


def _not_identical(pairs: Mapping[Name, tuple[torch.Tensor, torch.Tensor]]) -> list[Name]:
    """The names of pairs that may differ in a bit of their memory: all of a group that is compared at once, if one does."""
    left: list[Name] = []
    groups: dict[tuple[torch.device, torch.dtype], list[list[tuple[Name, torch.Tensor, torch.Tensor]]]] = {}
    # The oracle's modes would change the dtypes.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        for name, (a, b) in pairs.items():
            words = _words(a, b)
            if words is None:
                left.append(name)
            elif _is_on_host(a):
                left += [] if torch.equal(*words) else [name]
            else:
                parts = groups.setdefault((a.device, words[0].dtype), [[]])
                joined = sum(word.nbytes for _, word, _ in parts[-1]) + words[0].nbytes
                if parts[-1] and joined > MOST_JOINED:
                    parts.append([])
                parts[-1].append((name, *words))
        parts = [part for group in groups.values() for part in group]
        flags = [_joined([a for _, a, _ in part]).ne(_joined([b for _, _, b in part])).any() for part in parts]
        differing = numbers(flags)
    changed = {name for part, flag in zip(parts, differing, strict=True) if flag for name, _, _ in part} | set(left)
    return [name for name in pairs if name in changed]


def _is_on_host(tensor: torch.Tensor) -> bool:
    """Whether operations on a tensor are calls, not launches."""
    return bool(tensor.device.type == "cpu")


def _joined(words: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(words)) if len(words) > 1 else words[0]


def _words(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The memory of two dense tensors of one layout as integers; None if it does not tell whether they are equal."""
    # Without the oracle's modes, dtypes may differ that are equal with them.
    is_same = a.dtype == b.dtype and a.stride() == b.stride() and a.device == b.device
    if not (is_same and _is_plain(a) and _is_plain(b)):
        return None
    count, width = a.numel(), a.element_size()
    starts = [tensor.storage_offset() * width for tensor in (a, b)]
    word = next(word for word in WORDS if not any(size % word.itemsize for size in (count * width, *starts)))
    first, second = (tensor.detach().as_strided((count,), (1,)) for tensor in (a, b))
    return first.view(word), second.view(word)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is its values, one after the other in any order of the dimensions."""
    is_strided = tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.is_quantized
    if not is_strided or tensor.is_complex() or tensor.is_neg():
        return False
    reach = 1
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(dimension for dimension in dimensions if dimension[1] > 1):
        if stride != reach:
            return False
        reach *= size
    return True


def computable(value: torch.Tensor) -> torch.Tensor:
    """The same numbers in a dtype with arithmetic and comparisons, which float8 lacks."""
    return value.float() if value.is_floating_point() and value.element_size() == 1 else value


def _differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a != b) & ~((a != a) & (b != b))


def _flagged(names: Sequence[Name], flags: Iterable[torch.Tensor]) -> list[Name]:
    return [name for name, flag in zip(names, numbers(list(flags)), strict=True) if flag]
