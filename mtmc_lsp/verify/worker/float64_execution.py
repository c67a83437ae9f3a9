"""Runs the user's own code in float64, rounding only where that code itself asks for a narrower float. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from mtmc_lsp.core.graph import RANDOM_OPS

NARROW = (torch.float16, torch.bfloat16, torch.float32)
CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}
"""Methods that cast, and to what."""
BY_TYPE = {"Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32, "Double": torch.float64}
"""What ``torch.HalfTensor`` and the like hold."""
OF_DTYPES = frozenset({"can_cast", "promote_types", "result_type"})
"""Functions that say something of dtypes, and compute nothing."""
AUTOCAST = frozenset(
    """linear matmul __matmul__ __rmatmul__ mm mv bmm addmm addmv addbmm baddbmm einsum bilinear prelu
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention""".split()
)
"""Functions whose results autocast makes half."""


class _Held(NamedTuple):
    """An input as the user's own code has it."""

    wide: torch.Tensor
    own: torch.Tensor
    version: int


class Float64Mode(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Computes every float in float64, and answers what a tensor's dtype is as the user's own run does.

    Each float64 tensor stands for one of a dtype of the user's, its *own dtype*: that of the input, promoted through operations.
    So code that asks for it (``x.dtype == torch.float32``, ``torch.finfo(x.dtype)``, ``.to(x.dtype)``) does what it does there.

    Where the code casts to a float that cannot hold the own dtype (``.half()`` of a float32 tensor; ``.to(x.dtype)`` behind
    a ``.float()``), the value is rounded through that dtype and goes on in float64: the rounding is part of the function, as
    in ``x - x.half().float()``. A cast to one that can hold it, or to the own dtype itself, changes no value. What the dtype of
    operands or autocast alone rounds is an error of the user's code and no part of its function: it is left exact. Casts to
    integers and to float8 are carried out as they stand.

    Random numbers are drawn in the dtype that the code asks for: in another the generator gives others.
    """

    def __init__(self, default: torch.dtype = torch.float32) -> None:
        """No inputs are known yet; ``default`` is the dtype of tensors that the user's code makes without naming one."""
        super().__init__()
        self._default = default
        self._own = WeakTensorKeyDictionary()
        self._held: dict[int, _Held] = {}
        self._generators: dict[torch.device, torch.Generator] | None = None
        self._seed = 0
        self._together = False
        self.rounds = False
        """Whether some cast has rounded."""

    @contextlib.contextmanager
    def holding(
        self,
        wide: Mapping[str, torch.Tensor],
        own: Mapping[str, torch.Tensor],
        *,
        scattered: int | None = None,
        together: bool = False,
    ) -> Iterator[None]:
        """While this lasts, these float64 tensors stand for those.

        Args:
            wide: the inputs in float64; they may be moved by rounding, but not where the code casts an input itself: all who
                compute the function cast the same number.
            own: as the user's own code has them.
            scattered: a seed. Results that their own dtype cannot hold are then rounded to it, to one neighbour or the other
                by chance (Parker's random rounding): how far the code's results scatter tells how far those of another order
                of the same operations may lie. What is exact stays so.
            together: all elements of a result are scattered alike, so that equal ones stay equal. Rounding does that: of many
                elements next to one number all errors are one, which a sum magnifies and does not even out.
        """
        self._held = {
            _storage(tensor): _Held(tensor, own[name], tensor._version)
            for name, tensor in wide.items()
            if tensor.is_floating_point()
        }
        if scattered is not None:
            self._seed, self._generators, self._together = scattered, {}, together
        try:
            yield
        finally:
            self._held, self._generators = {}, None

    def own_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype that a tensor has in the user's own run."""
        if tensor.dtype != torch.float64:
            return tensor.dtype
        known = self._own.get(tensor)
        if known is None:
            held = self._held.get(_storage(tensor))
            if held is None:
                # A module's other parameters were widened with it.
                wide = any(own.own.dtype == torch.float64 for own in self._held.values())
                return torch.float64 if wide else self._default
            self._own[tensor] = known = held.own.dtype
        return known

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if getattr(function, "__self__", None) is torch.Tensor.dtype:
            return self.own_dtype(args[0])
        if name == "type" and len(args) == 1 and "dtype" not in kwargs:
            return _type_name(args[0], self.own_dtype(args[0]))
        if name in OF_DTYPES:
            found = function(*args, **kwargs)
            is_wide = name == "result_type" and found == torch.float64
            return self._result_dtype(name, (*args, *kwargs.values())) if is_wide else found
        if name in RANDOM_OPS:
            asked = kwargs.get("dtype") or self._default
            drawn = function(*args, **{**kwargs, "dtype": asked}).to(torch.float64)
            return self._noted(drawn, asked)
        cast = self._cast_to(name, args, kwargs)
        if cast is not None:
            return self._cast(function, cast, args, kwargs)
        asked = next((a for a in (*args, kwargs.get("dtype")) if isinstance(a, torch.dtype)), None)
        if kwargs.get("dtype") in NARROW:
            kwargs["dtype"] = torch.float64
        wide_args = tuple(_wide(a) for a in args)
        result = function(*wide_args, **kwargs)
        operands = (*args, *kwargs.values())
        if not any(made.dtype == torch.float64 for made in _tensors([result])):
            return result
        return self._finished(result, self._result_dtype(name, operands) if asked is None else asked, operands)

    # Casts -------------------------------------------------------------------------------------------------------

    def _cast_to(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> torch.dtype | None:
        """The dtype that a call of a tensor's method casts to; None where it is no cast."""
        if not args or not isinstance(args[0], torch.Tensor):
            return None
        if name in CASTS:
            return CASTS[name]
        if name not in ("to", "type", "type_as"):
            return None
        for asked in (*args[1:], *kwargs.values()):
            if isinstance(asked, torch.dtype):
                return asked
            if isinstance(asked, torch.Tensor):
                return self.own_dtype(asked)
            if name == "type":
                text = asked if isinstance(asked, str) else getattr(asked, "__name__", "")
                return BY_TYPE.get(text.rpartition(".")[2].removesuffix("Tensor"))
        return None

    def _cast(self, function: Any, asked: torch.dtype, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
        x: torch.Tensor = args[0]
        own = self.own_dtype(x)
        is_known = asked in NARROW or asked == torch.float64
        loses = is_known and _loses(own, asked)
        if loses or not is_known:
            x = self._unmoved(x)
        if not is_known:
            result: torch.Tensor = function(x, *args[1:], **kwargs)
            return result
        if loses:
            self.rounds = self.rounds or own.is_floating_point
            x = x.to(asked)
        if function.__name__ == "to":
            other = next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.Tensor)), None)
            rest = [_wide(a) for a in args[1:] if not isinstance(a, torch.Tensor)]
            named = {key: _wide(a) for key, a in kwargs.items() if not isinstance(a, torch.Tensor)}
            result = x.to(other.device, torch.float64, *rest, **named) if other is not None else x.to(*rest, **named)
        else:
            result = x.to(torch.float64)
        if result is args[0] and own != asked:
            # In the user's own run it is a tensor of its own.
            result = result.clone()
        return self._noted(result, asked) if result is not args[0] else result

    def _unmoved(self, x: torch.Tensor) -> torch.Tensor:
        """An input, or a view of one, with the values that it has in the user's own run."""
        held = self._held.get(_storage(x))
        if held is None or x.dtype != torch.float64 or x._version != held.version:
            return x
        if held.wide.stride() != held.own.stride():
            return x
        offset = held.own.storage_offset() + x.storage_offset() - held.wide.storage_offset()
        exact = held.own.detach().as_strided(x.shape, x.stride(), offset).to(torch.float64)
        return x + (exact - x).detach() if x.requires_grad else exact

    # Results -----------------------------------------------------------------------------------------------------

    def _result_dtype(self, name: str, values: Iterable[Any]) -> torch.dtype:
        """The own dtype of what an operation makes of its operands."""
        floats = [value for value in _tensors(values) if value.is_floating_point()]
        if not floats:
            return self._default
        device = floats[0].device.type
        if name in AUTOCAST and torch.is_autocast_enabled(device):
            half: torch.dtype = torch.get_autocast_dtype(device)
            return half if all(self.own_dtype(value) != torch.float64 for value in floats) else torch.float64
        # Scalars in tensors do not widen others.
        deciding = [value for value in floats if value.dim()] or floats
        found = self.own_dtype(deciding[0])
        for value in deciding[1:]:
            other = self.own_dtype(value)
            found = found if other == found or other.itemsize == 1 else torch.promote_types(found, other)
        return found

    def _finished(self, result: Any, own: torch.dtype, operands: Iterable[Any]) -> Any:
        """A result, noted, and scattered where that is asked for."""
        given = list(_tensors(operands))
        if not isinstance(result, torch.Tensor):
            for made in _tensors([result]):
                if not any(made is each for each in given):
                    self._noted(made, own)
            return result
        if any(result is each for each in given):
            return result
        if self._generators is not None and own != torch.float64 and not result._is_view():
            result = self._scattered(result, own)
        return self._noted(result, own)

    def _noted(self, result: torch.Tensor, own: torch.dtype) -> torch.Tensor:
        if result.dtype == torch.float64 and own.is_floating_point:
            self._own[result] = own
        return result

    def _scattered(self, value: torch.Tensor, own: torch.dtype) -> torch.Tensor:
        """Each element, where ``own`` cannot hold it, as one of its two neighbours there."""
        assert self._generators is not None
        plain = value.detach()
        if plain.device not in self._generators:
            self._generators[plain.device] = torch.Generator(plain.device).manual_seed(self._seed)
        shape = (1,) * plain.dim() if self._together else plain.shape
        chance = torch.rand(shape, generator=self._generators[plain.device], device=plain.device, dtype=plain.dtype)
        factor = chance.sub_(0.5).mul_(torch.finfo(own).eps).add_(1.0)
        # In place: what is scattered may be of gigabytes.
        moved = factor * plain if self._together else factor.mul_(plain)
        moved.copy_(moved.to(own))
        moved = torch.where((plain.to(own) == plain) | ~torch.isfinite(moved), plain, moved)
        return value + torch.where(torch.isfinite(plain), moved - plain, 0.0) if value.requires_grad else moved


def _storage(tensor: torch.Tensor) -> int:
    """What tells tensors that share memory."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else 0


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def _loses(own: torch.dtype, asked: torch.dtype) -> bool:
    """Whether a cast may change values; ``asked`` is a float of at least two bytes."""
    if own == asked or own == torch.bool or own.is_complex:
        return False
    if not own.is_floating_point:
        return True
    mine, wanted = torch.finfo(own), torch.finfo(asked)
    return bool(wanted.eps > mine.eps or wanted.max < mine.max or wanted.tiny > mine.tiny)


def _type_name(tensor: torch.Tensor, own: torch.dtype) -> str:
    kind: str = tensor.type()
    named = next((name for name, dtype in BY_TYPE.items() if dtype == own), "")
    return f"{kind.rpartition('.')[0]}.{named}Tensor" if named else kind
