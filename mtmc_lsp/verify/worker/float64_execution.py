"""Runs the reference in float64, rounding only where its code casts to a narrower float. Runs in workers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from mtmc_lsp.capture.worker.arguments.strided_tensors import laid_out
from mtmc_lsp.capture.worker.autocast.dtypes import result_dtype
from mtmc_lsp.process.gpu_lock import let_timings_pass
from mtmc_lsp.verify.worker.values.float8 import SCALED_PRODUCT, scaled_product
from mtmc_lsp.verify.worker.values.stochastic_rounding import rounded_at_random, rounded_sum

NARROW = (torch.float16, torch.bfloat16, torch.float32)
CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}
"""Methods that cast, with their dtypes."""
BY_TYPE = {"Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32, "Double": torch.float64}
"""The dtypes of ``torch.HalfTensor`` and the like."""
DTYPE_FUNCTIONS = frozenset({"can_cast", "promote_types", "result_type"})
"""Functions that return information on dtypes and compute nothing."""
SUMS = frozenset({"sum", "nansum", "mean", "nanmean", "var", "std", "norm", "vector_norm", "dot", "mv", "cumsum"})
"""Functions that add many elements, so even a sum that the dtype can hold is rounded on the way."""


CALLS_BETWEEN_TIMINGS = 64
"""After this many calls of torch, a timing that waits for the GPU may pass. A look at the lock takes as long as two calls."""
DRAWS = frozenset({"rand", "randn", "rand_like", "randn_like"})
"""Functions that draw random numbers of a dtype."""
DRAWS_IN_PLACE = frozenset({"normal_", "uniform_", "exponential_", "bernoulli_"})
"""Methods that fill a tensor with random numbers. Which numbers they draw depends on the dtype."""
TRANSPOSED_CONVOLUTIONS = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
SPECIAL = (
    DTYPE_FUNCTIONS
    | DRAWS
    | DRAWS_IN_PLACE
    | TRANSPOSED_CONVOLUTIONS
    | CASTS.keys()
    | {SCALED_PRODUCT, "__get__", "to", "type", "type_as"}
)
"""Functions that do more under :class:`Float64Mode` than compute in float64, whatever their operands."""
GROUPS_POSITION = 6
COLUMN_BYTES = 2e9
"""Most memory for one image's columns, which torch's convolutions without cuDNN multiply."""


class _Input(NamedTuple):
    """An input of the target."""

    wide: torch.Tensor
    original: torch.Tensor
    """The tensor in the user's dtype."""
    version: int


class Float64Mode(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Computes all floats in float64, and reports the dtypes that the user's code would see.

    Each float64 tensor represents a tensor of another dtype in a normal run, its *user dtype*: that of the input, promoted
    through operations. So code that depends on it (``x.dtype == torch.float32``, ``torch.finfo(x.dtype)``, ``.to(x.dtype)``)
    behaves as in a normal run.

    If the code casts to a float that cannot hold the user dtype (``.half()`` of a float32 tensor; ``.to(x.dtype)`` after a
    ``.float()``), the value is rounded through that dtype and stays float64: the rounding is part of the function, as in
    ``x - x.half().float()``. A cast to a dtype that can hold it changes no value. Rounding that only comes from the dtype of
    operands or from autocast is an error of the reference and not part of its function: it is omitted. Casts to integers and
    to float8 are carried out.

    Random numbers are drawn in the dtype that the code requests, because another dtype gives other numbers.
    """

    def __init__(self, default: torch.dtype = torch.float32) -> None:
        """Create the mode without inputs; ``default`` is the dtype of tensors that the code creates without a dtype."""
        super().__init__()
        self._default = default
        self._user_dtypes = WeakTensorKeyDictionary()
        self._inputs: dict[int, _Input] = {}
        self._generators: dict[torch.device, torch.Generator] | None = None
        self._seed = 0
        self._shares_draw = False
        self._calls = 0
        self.between_calls: Callable[[], None] = let_timings_pass
        """Called after every :data:`CALLS_BETWEEN_TIMINGS` calls of torch."""
        self._has_one_dtype = False
        """Whether all floats so far have the default as user dtype, so that nothing needs to be recorded."""
        self._had_others = False
        """Whether some float of this or an earlier run had another one."""
        self.rounding_epsilon = 0.0
        """The epsilon of the coarsest dtype that a cast of the code has rounded to; 0 if none has."""
        self.result_epsilon = 0.0
        """The epsilon of the coarsest dtype that an operation of the code has rounded its result to; 0 if only the default."""

    @contextlib.contextmanager
    def with_inputs(
        self,
        wide: Mapping[str, torch.Tensor],
        original: Mapping[str, torch.Tensor],
        *,
        rounding_seed: int | None = None,
        shares_draw: bool = False,
    ) -> Iterator[None]:
        """In this context the float64 tensors ``wide`` represent the tensors ``original``.

        Args:
            wide: the inputs in float64. They may be perturbed; if the code casts an input itself, the original value is cast,
                because every implementation of the function casts the same number.
            original: the inputs in the user's dtypes.
            rounding_seed: if set, results that their user dtype cannot hold are rounded stochastically to one of the two
                neighbours (Parker's random rounding). The spread of such results estimates the errors of the same operations
                in another order. Exact results stay exact.
            shares_draw: whether all elements of a result are rounded with the same random number, so that equal elements stay
                equal. Real rounding does that too: if all elements are close to one number, their errors are equal, and a sum
                magnifies them instead of averaging them out.
        """
        self._inputs = {
            _storage(tensor): _Input(tensor, original[name], tensor._version)
            for name, tensor in wide.items()
            if tensor.is_floating_point()
        }
        dtypes = {item.original.dtype for item in self._inputs.values()}
        is_plain = rounding_seed is None and not self._had_others
        self._has_one_dtype = is_plain and self._default in NARROW and dtypes <= {self._default}
        if rounding_seed is not None:
            self._seed, self._generators, self._shares_draw = rounding_seed, {}, shares_draw
        try:
            yield
        finally:
            self._inputs, self._generators = {}, None

    def user_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype of a tensor in a normal run."""
        if tensor.dtype != torch.float64:
            return tensor.dtype
        known = self._user_dtypes.get(tensor)
        if known is None:
            held = self._inputs.get(_storage(tensor))
            if held is None:
                # Not an input: a parameter that the graph does not use, which was widened with the module.
                is_wide = any(item.original.dtype == torch.float64 for item in self._inputs.values())
                return torch.float64 if is_wide else self._default
            self._user_dtypes[tensor] = known = held.original.dtype
        return known

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        self._calls += 1
        if not self._calls % CALLS_BETWEEN_TIMINGS:
            # A run of a user's loop may take seconds.
            self.between_calls()
        if self._has_one_dtype and name not in SPECIAL and not (_names_dtype(args, kwargs) or _is_autocast_enabled()):
            # Loops of users call hundreds of thousands of these.
            return function(*args, **kwargs) if kwargs else function(*args)
        kwargs = dict(kwargs or {})
        if getattr(function, "__self__", None) is torch.Tensor.dtype:
            return self.user_dtype(args[0])
        if name == "type" and len(args) == 1 and "dtype" not in kwargs:
            return _type_name(args[0], self.user_dtype(args[0]))
        if name in DTYPE_FUNCTIONS:
            answer = function(*args, **kwargs)
            is_wide = name == "result_type" and answer == torch.float64
            return self._result_dtype(name, (*args, *kwargs.values())) if is_wide else answer
        # The functions of torch.nn.init have the same names, and get their tensor as a keyword.
        if name in DRAWS_IN_PLACE and args and args[0].dtype == torch.float64:
            drawn = torch.empty_like(args[0], dtype=self.user_dtype(args[0]))
            return args[0].copy_(function(drawn, *(_wide(a) for a in args[1:]), **kwargs))
        if name in DRAWS:
            requested = kwargs.get("dtype") or (self.user_dtype(args[0]) if name.endswith("like") else self._default)
            drawn = function(*args, **{**kwargs, "dtype": requested}).to(torch.float64)
            return self._with_user_dtype(drawn, requested)
        if name == SCALED_PRODUCT:
            return self._product(args, kwargs)
        cast = self._cast_to(name, args, kwargs)
        if cast is not None:
            return self._cast(function, cast, args, kwargs)
        requested = next((a for a in (*args, kwargs.get("dtype")) if isinstance(a, torch.dtype)), None)
        if kwargs.get("dtype") in NARROW:
            kwargs["dtype"] = torch.float64
        wide_args = tuple(self._operand(name, a) for a in args)
        with _fastest_convolution(name, args, kwargs):
            result = function(*wide_args, **kwargs)
        operands = (*args, *kwargs.values())
        if not any(tensor.dtype == torch.float64 for tensor in _tensors([result])):
            return result
        user_dtype = self._result_dtype(name, operands) if requested is None else requested
        return self._finished(result, user_dtype, operands, is_sum=name.lstrip("_") in SUMS)

    # Casts -------------------------------------------------------------------------------------------------------

    def _cast_to(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> torch.dtype | None:
        """The dtype that a call of a tensor's method casts to; None if it is not a cast."""
        if not args or not isinstance(args[0], torch.Tensor):
            return None
        if name in CASTS:
            return CASTS[name]
        if name not in ("to", "type", "type_as"):
            return None
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, torch.dtype):
                return value
            if isinstance(value, torch.Tensor):
                return self.user_dtype(value)
            if name == "type":
                text = value if isinstance(value, str) else getattr(value, "__name__", "")
                return BY_TYPE.get(text.rpartition(".")[2].removesuffix("Tensor"))
        return None

    def _cast(self, function: Any, target: torch.dtype, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
        x: torch.Tensor = args[0]
        user_dtype = self.user_dtype(x)
        is_plain_float = target in NARROW or target == torch.float64
        rounds = is_plain_float and _may_round(user_dtype, target)
        if rounds or not is_plain_float:
            x = self._original_values(x)
        if not is_plain_float:
            result: torch.Tensor = function(x, *args[1:], **kwargs)
            return result
        if rounds:
            if user_dtype.is_floating_point:
                self.rounding_epsilon = max(self.rounding_epsilon, torch.finfo(target).eps)
            x = x.to(target)
        if function.__name__ == "to":
            other = next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.Tensor)), None)
            rest = [_wide(a) for a in args[1:] if not isinstance(a, torch.Tensor)]
            named = {key: _wide(a) for key, a in kwargs.items() if not isinstance(a, torch.Tensor)}
            result = x.to(other.device, torch.float64, *rest, **named) if other is not None else x.to(*rest, **named)
        else:
            result = x.to(torch.float64)
        if result is args[0] and user_dtype != target:
            # In a normal run the cast returns a new tensor.
            result = result.clone()
        return self._with_user_dtype(result, target) if result is not args[0] else result

    def _product(self, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """A product of float8 operands, whose result has the dtype that the code requests."""
        result = scaled_product(*args, **kwargs)
        requested = next((a for a in (*args[6:7], kwargs.get("out_dtype")) if a is not None), self.user_dtype(args[0]))
        return self._finished(result, requested, args, is_sum=False) if requested in NARROW else result.to(requested)

    def _original_values(self, x: torch.Tensor) -> torch.Tensor:
        """An input, or a view of one, with the values of a normal run, without perturbation."""
        held = self._inputs.get(_storage(x))
        if held is None or x.dtype != torch.float64 or x._version != held.version:
            return x
        if held.wide.stride() != held.original.stride():
            return x
        offset = held.original.storage_offset() + x.storage_offset() - held.wide.storage_offset()
        exact = held.original.detach().as_strided(x.shape, x.stride(), offset).to(torch.float64)
        return x + (exact - x).detach() if x.requires_grad else exact

    def _operand(self, name: str, value: Any) -> Any:
        """An operand in float64; with stochastic rounding, those that autocast casts are rounded, too."""
        if self._generators is not None and isinstance(value, torch.Tensor) and value.dtype == torch.float64:
            dtype = result_dtype(name, value.device.type)
            if dtype is not None and _may_round(self.user_dtype(value), dtype):
                return self._rounded_stochastically(value, dtype, None)
        return _wide(value)

    # Results -----------------------------------------------------------------------------------------------------

    def _result_dtype(self, name: str, values: Iterable[Any]) -> torch.dtype:
        """The user dtype of the result of an operation on these operands."""
        floats = [value for value in _tensors(values) if value.is_floating_point()]
        if not floats:
            return self._default
        device = floats[0].device.type
        dtype = result_dtype(name, device)
        if dtype is not None and all(self.user_dtype(value) != torch.float64 for value in floats):
            return dtype
        # Tensors without dimensions do not widen others.
        deciding = [value for value in floats if value.dim()] or floats
        result = self.user_dtype(deciding[0])
        for value in deciding[1:]:
            other = self.user_dtype(value)
            result = result if other == result or other.itemsize == 1 else torch.promote_types(result, other)
        return result

    def _finished(self, result: Any, user_dtype: torch.dtype, operands: Iterable[Any], *, is_sum: bool) -> Any:
        """A result with its user dtype recorded, and stochastically rounded if requested."""
        operand_tensors = list(_tensors(operands))
        if not isinstance(result, torch.Tensor):
            for tensor in _tensors([result]):
                if not any(tensor is operand for operand in operand_tensors):
                    self._with_user_dtype(tensor, user_dtype)
            return result
        if any(result is operand for operand in operand_tensors):
            return result
        if user_dtype != self._default and user_dtype.is_floating_point and not result._is_view():
            self.result_epsilon = max(self.result_epsilon, torch.finfo(user_dtype).eps)
        if self._generators is not None and user_dtype != torch.float64 and not result._is_view():
            summed = operand_tensors[0] if is_sum and operand_tensors else None
            result = self._rounded_stochastically(result, user_dtype, summed)
        return self._with_user_dtype(result, user_dtype)

    def _with_user_dtype(self, result: torch.Tensor, user_dtype: torch.dtype) -> torch.Tensor:
        if result.dtype == torch.float64 and user_dtype.is_floating_point:
            self._user_dtypes[result] = user_dtype
            if user_dtype != self._default:
                self._has_one_dtype, self._had_others = False, True
        return result

    def _rounded_stochastically(
        self, value: torch.Tensor, dtype: torch.dtype, summed: torch.Tensor | None
    ) -> torch.Tensor:
        """Each element that ``dtype`` cannot hold, as one of its two neighbours in ``dtype``.

        Sums (of ``summed``) that it can hold may get another neighbour too, unless all summands are whole numbers: the mean of
        equal numbers is that number, but partial sums are rounded.
        """
        assert self._generators is not None
        plain = value.detach()
        if plain.device not in self._generators:
            self._generators[plain.device] = torch.Generator(plain.device).manual_seed(self._seed)
        generator = self._generators[plain.device]
        shape = (1,) * plain.dim() if self._shares_draw else tuple(plain.shape)
        if summed is not None and summed.numel() > plain.numel():
            rounded = rounded_sum(plain, dtype, summed.detach(), generator, shape)
        else:
            rounded = rounded_at_random(plain, dtype, generator, shape)
        if value.requires_grad:
            # In place, because tensors may have gigabytes.
            return value + rounded.sub_(plain).masked_fill_(~torch.isfinite(plain), 0.0)
        # Code that follows may depend on the strides, as in `torch.empty_strided(...).as_strided(...)`.
        return rounded if rounded.stride() == value.stride() else laid_out(rounded, value.stride())


def _fastest_convolution(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> contextlib.AbstractContextManager[Any]:
    """A context in which a transposed convolution runs without cuDNN, which is slow in float64.

    On an H100, 32 images of 64 x 128 x 128 take 9 ms instead of 50 ms, eight volumes of 32 x 16 x 64 x 64 take 11 ms instead
    of 92 ms. Torch computes groups one after the other, so these are left to cuDNN.
    """
    if name not in TRANSPOSED_CONVOLUTIONS or len(args) < 2 or not args[0].is_cuda:
        return contextlib.nullcontext()
    x, weight = args[:2]
    groups = args[GROUPS_POSITION] if len(args) > GROUPS_POSITION else kwargs.get("groups", 1)
    positions = math.prod(x.shape[2 - (x.dim() < weight.dim()) :])
    if groups != 1 or 8.0 * positions * math.prod(weight.shape[1:]) > COLUMN_BYTES:
        return contextlib.nullcontext()
    off: contextlib.AbstractContextManager[Any] = torch.backends.cudnn.flags(enabled=False)
    return off


def _storage(tensor: torch.Tensor) -> int:
    """A number that is equal for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else 0


def _is_autocast_enabled() -> bool:
    return bool(torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))


def _names_dtype(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a dtype is among the arguments of a call."""
    for value in args:
        # Faster than ``any`` of a generator.
        if type(value) is torch.dtype:
            return True
    return bool(kwargs) and any(type(value) is torch.dtype for value in (kwargs or {}).values())


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def _may_round(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast may change values; ``target`` is a float of at least two bytes."""
    if source == target or source == torch.bool or source.is_complex:
        return False
    if not source.is_floating_point:
        return True
    old, new = torch.finfo(source), torch.finfo(target)
    return bool(new.eps > old.eps or new.max < old.max or new.tiny > old.tiny)


def _type_name(tensor: torch.Tensor, user_dtype: torch.dtype) -> str:
    """The result of ``tensor.type()`` in a normal run."""
    kind: str = tensor.type()
    name = next((name for name, dtype in BY_TYPE.items() if dtype == user_dtype), "")
    return f"{kind.rpartition('.')[0]}.{name}Tensor" if name else kind
