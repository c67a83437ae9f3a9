"""Makes the interpreter decide once for each pair of types how operands are converted. Runs in workers.

Triton's interpreter uses the compiler's code for each operation of each program: it compares types, converts operands and
broadcasts them. The decision depends on the types alone, which are the same in all programs of a kernel.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from mtmc_lsp.verify.worker.interpreter.operators import direct_operator
from mtmc_lsp.verify.worker.interpreter.stand_in import stand_in

PLAIN_CASTS = frozenset(
    (("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "fp32"), ("int32", "int64"), ("int32", "fp32"), ("int64", "fp32"))
)
"""Types of casts for which the compiler's code always chooses a plain conversion of the interpreter."""
MOST_CONSTANTS, MOST_ELEMENTS = 2048, 4096
"""Limits for the tiles of constants that are kept: their number, and the elements of each (at most 64 MB in all)."""


def speed_up_operands(interpreter: Any) -> None:
    """Cache the decisions about operands, and make fewer steps for each operation."""
    for step in (
        _skip_overflow_checks,
        _compare_types_by_name,
        _cache_types_of_tiles,
        _cache_conversions,
        _cache_type_checks,
        _convert_defaults_of_loads_first,
        _keep_cache_policies,
        _make_plain_handles,
        _call_builtins_directly,
    ):
        # Other versions of Triton lack some of these internals and are only slower.
        with contextlib.suppress(AttributeError, ImportError):
            step(interpreter)


def _skip_overflow_checks(interpreter: Any) -> None:
    """Do not compute each operation on whole numbers a second time in int64: without debug mode, nothing reads the result.

    This halves the time of a kernel that computes indices (3x3 max pooling: 689 to 330 ms for 93 programs).
    """
    semantic = type(interpreter.interpreter_semantic)
    original = semantic.binary_op_sanitize_overflow_impl

    def binary_op_sanitize_overflow_impl(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            original(self, lhs, rhs, binary_op)

    semantic.binary_op_sanitize_overflow_impl = stand_in(binary_op_sanitize_overflow_impl, original)


def _compare_types_by_name(interpreter: Any) -> None:
    """Compare element types, and look whether a value is a constant, without a search through all kinds of values."""
    core = interpreter.tl.core
    dtype, tensor = core.dtype, core.tensor
    equal, unwrap, integers = dtype.__eq__, core._unwrap_if_constexpr, frozenset(dtype.SINT_TYPES + dtype.UINT_TYPES)

    def __eq__(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is dtype else bool(equal(self, other))

    def is_int(self: Any) -> bool:
        return self.name in integers

    def _unwrap_if_constexpr(o: Any) -> Any:
        kind = type(o)
        return o if kind is tensor or kind is int or kind is float else unwrap(o)

    dtype.__eq__ = stand_in(__eq__, equal)
    dtype.is_int = stand_in(is_int, dtype.is_int)
    core._unwrap_if_constexpr = stand_in(_unwrap_if_constexpr, unwrap)


def _cache_types_of_tiles(interpreter: Any) -> None:
    """Make the type of a tile with other elements once."""
    block, own_builder = interpreter.tl.block_type, interpreter.interpreter_builder
    original, to_ir_type = block.with_element_ty, block.to_ir
    known: dict[tuple[str, str], Any] = {}

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        key = (self.name, scalar_ty.name)
        kind = known.get(key)
        # Pointers with equal names may differ in their address space.
        if kind is None or kind.element_ty is not scalar_ty:
            kind = known[key] = original(self, scalar_ty)
        return kind

    def to_ir(self: Any, builder: Any) -> Any:
        # The interpreter's own types are those of the language.
        return self if builder is own_builder else to_ir_type(self, builder)

    block.with_element_ty = stand_in(with_element_ty, original)
    block.to_ir = stand_in(to_ir, to_ir_type)


def _cache_conversions(interpreter: Any) -> None:
    """Return operands that need no cast and no broadcast without comparing their types part by part."""
    semantic = type(interpreter.interpreter_semantic)
    cast, broadcast, promote = semantic.cast, semantic.broadcast_impl_value, semantic.computation_type_impl
    unchanged = set[tuple[str, str]]()
    promoted: dict[tuple[Any, ...], Any] = {}

    def cast_if_needed(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source = input.type.scalar
        # Pointers with equal names may differ in their address space.
        target = dst_ty.scalar
        if source.name == target.name and not source.is_ptr():
            return input
        if fp_downcast_rounding is None and (source.name, target.name) in PLAIN_CASTS:
            kind = input.type.with_element_ty(target) if input.type.is_block() else target
            return self.tensor(self.builder.cast_impl(input.handle, kind), kind)
        return cast(self, input, dst_ty, fp_downcast_rounding)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        key = (lhs.type.name, rhs.type.name)
        if key in unchanged:
            return lhs, rhs
        wide = broadcast(self, lhs, rhs)
        if wide[0] is lhs and wide[1] is rhs:
            unchanged.add(key)
        return wide

    def computation_type_impl(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if key not in promoted:
            promoted[key] = promote(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return promoted[key]

    semantic.cast = stand_in(cast_if_needed, cast)
    semantic.broadcast_impl_value = stand_in(broadcast_impl_value, broadcast)
    semantic.computation_type_impl = stand_in(computation_type_impl, promote)


def _cache_type_checks(interpreter: Any) -> None:
    """Remember for pairs of types what an operation changes about its operands, and the tiles of Python numbers beside a tile."""
    semantic, tensor = type(interpreter.interpreter_semantic), interpreter.tl.tensor
    original, to_computation_type = semantic.binary_op_type_checking_impl, semantic._cast_to_computation_type
    unchanged = set[tuple[Any, ...]]()
    splats: dict[tuple[Any, ...], bool] = {}
    constants: dict[tuple[Any, ...], Any] = {}

    def splat(self: Any, scalar: Any, tile: Any) -> Any:
        kind = tile.type.with_element_ty(scalar.type)
        return self.tensor(self.builder.create_splat(kind, scalar.handle), kind)

    def check_tensors(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        key = (lhs.type.name, rhs.type.name, flags, *named.items())
        if key in unchanged:
            return lhs, rhs
        is_left = splats.get(key)
        if is_left is not None:
            return (splat(self, lhs, rhs), rhs) if is_left else (lhs, splat(self, rhs, lhs))
        checked = original(self, lhs, rhs, *flags, **named)
        keeps_left, keeps_right = checked[0] is lhs, checked[1] is rhs
        if keeps_left and keeps_right:
            unchanged.add(key)
        elif keeps_left and not rhs.type.is_block() and checked[1].type.scalar is rhs.type:
            splats[key] = False
        elif keeps_right and not lhs.type.is_block() and checked[0].type.scalar is lhs.type:
            splats[key] = True
        return checked

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        if type(lhs) is not tensor:
            return original(self, lhs, rhs, *flags, **named)
        if type(rhs) is tensor:
            return check_tensors(self, lhs, rhs, *flags, **named)
        kind = type(rhs)
        if kind is not int and kind is not float:
            return original(self, lhs, rhs, *flags, **named)
        # Text keeps 0.0 and -0.0 apart, and finds NaN again.
        key = (lhs.type.name, kind, rhs if kind is int else rhs.hex(), flags, *named.items())
        constant = constants.get(key)
        if constant is not None:
            return lhs, constant
        checked = original(self, lhs, rhs, *flags, **named)
        if checked[0] is lhs and checked[1].handle.data.size <= MOST_ELEMENTS:
            if len(constants) >= MOST_CONSTANTS:
                constants.clear()
            constants[key] = checked[1]
        return checked

    def _cast_to_computation_type(self: Any, value: Any, dtype: Any) -> Any:
        return self.cast(value, dtype) if type(value) is tensor else to_computation_type(self, value, dtype)

    semantic.binary_op_type_checking_impl = stand_in(binary_op_type_checking_impl, original)
    semantic._cast_to_computation_type = stand_in(_cast_to_computation_type, to_computation_type)


def _convert_defaults_of_loads_first(interpreter: Any) -> None:
    """Convert the value of elements that are not loaded before it becomes a tile."""
    semantic, tensor = type(interpreter.interpreter_semantic), interpreter.tl.tensor
    original = semantic.load

    def load(self: Any, ptr: Any, mask: Any, other: Any, *options: Any) -> Any:
        if type(other) is tensor and type(ptr) is tensor and mask is not None and not other.type.is_block():
            kind = ptr.type.scalar
            if kind.is_ptr() and (other.type.scalar.name, kind.element_ty.name) in PLAIN_CASTS:
                other = self.cast(other, kind.element_ty)
        return original(self, ptr, mask, other, *options)

    semantic.load = stand_in(load, original)


def _keep_cache_policies(interpreter: Any) -> None:
    """Make the cache policy of loads and stores once for each pair of names."""
    core = interpreter.tl.core
    original = core._normalize_cache_policy
    known: dict[tuple[Any, Any], Any] = {}

    def _normalize_cache_policy(cache_policy: Any, cache_modifier: Any, eviction_policy: Any) -> Any:
        if cache_policy is not None or type(cache_modifier) is not str or type(eviction_policy) is not str:
            return original(cache_policy, cache_modifier, eviction_policy)
        key = (cache_modifier, eviction_policy)
        if key not in known:
            known[key] = original(None, cache_modifier, eviction_policy)
        return known[key]

    core._normalize_cache_policy = stand_in(_normalize_cache_policy, original)


def _make_plain_handles(interpreter: Any) -> None:
    """Check the size of a handle's elements once for each pair of types, and make no dictionary by a factory."""
    handle = interpreter.TensorHandle
    original = handle.__init__
    is_valid = interpreter._validate_np_data_size
    valid = set[tuple[Any, str]]()

    def __init__(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        key = (data.itemsize, dtype.name)
        if key not in valid:
            self.__post_init__()
            valid.add(key)

    def _validate_np_data_size(np_array: Any, tl_dtype: Any) -> bool:
        key = (np_array.itemsize, tl_dtype.name)
        if key in valid:
            return True
        return bool(is_valid(np_array, tl_dtype))

    handle.__init__ = stand_in(__init__, original)
    interpreter._validate_np_data_size = stand_in(_validate_np_data_size, is_valid)


def _call_builtins_directly(interpreter: Any) -> None:
    """Find the functions of ``triton.language`` once, and call them without copying their keyword arguments twice."""
    original, semantic, core = interpreter._patch_builtin, interpreter.interpreter_semantic, interpreter.tl.core
    checked = core.builtin(lambda: None).__code__
    known: dict[int, tuple[int, list[tuple[str, Any, Any]]]] = {}

    def direct(member: Any) -> Any:
        # The decorator of Triton's functions only checks that this argument is given.
        function: Any = member.__wrapped__ if getattr(member, "__code__", None) is checked else member

        def new_member(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return new_member

    def _patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        count, members = known.get(id(pkg), (-1, []))
        if count != len(vars(pkg)) or any(getattr(pkg, n, None) not in (old, new) for n, old, new in members):
            # A module with two names in a file is patched twice, and then has no builtins left.
            builtins = inspect.getmembers(pkg, core.is_builtin) or [(name, member) for name, member, _ in members]
            of_tiles = pkg is interpreter.tl.tensor
            members = [
                (name, member, direct_operator(name, direct(member), interpreter) if of_tiles else direct(member))
                for name, member in builtins
            ]
            known[id(pkg)] = len(vars(pkg)), members
        for name, _, new_member in members:
            # A launch inside of another one finds the functions replaced.
            if getattr(pkg, name) is not new_member:
                scope.set_attr(pkg, name, new_member)

    interpreter._patch_builtin = stand_in(_patch_builtin, original)
