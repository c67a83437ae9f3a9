"""The helper that launches compiled kernels directly: for generated launchers, and for the edit ``direct-launch``.

``kernel[grid](...)`` searches for the compiled kernel in every launch: Triton specialises all arguments and renders the
options as text. That is about half of the host time of a launch, 23 us on an H100 host with Triton 3.6, and many kernels
take less on the GPU. Then Triton's launcher asks each tensor for its address, and the driver whether it is on the GPU. The
helper keeps compiled kernels and passes addresses as numbers, which the launcher does not check.

All generated launchers use the helper, also those of large kernels. Whether the host or the GPU takes longer depends on the
sizes of a call and on the work that is queued before it, and the host is free earlier in any case.
"""

from __future__ import annotations

import re

NAME = "_DirectLaunches"
_HELPER = '''class HELPER:
    """A kernel whose compiled versions are launched directly: without a search, and without a check of each pointer.

    A version is kept for all that Triton specialises on: device and dtypes of tensors, whether integers are 1,
    multiples of 16 or beyond 32 bits, constants and options. An autotuner reads its key as well, and heuristics may
    read all arguments, so their values and the layouts of tensors count, too. Launches with unaligned tensors or
    changed settings are left to Triton.
    """

    def __init__(self, fn):
        self.fn, self.forms, self.by_value, hooks = fn, {}, set(), []
        while hasattr(fn, "fn") and not isinstance(fn, triton.JITFunction):
            self.by_value |= set(getattr(fn, "keys", fn.arg_names))  # what an autotuner reads, or heuristics
            hooks += [config.pre_hook for config in getattr(fn, "configs", [])]
            fn = fn.fn
        # For AMD's GPUs Triton also specialises on the size of tensors.
        self.is_direct = isinstance(fn, triton.JITFunction) and torch.version.hip is None and not any(hooks)
        self.kernel, self.names = fn, fn.arg_names if self.is_direct else []
        self.variables = {p.name for p in fn.params if not p.is_constexpr} if self.is_direct else set()
        self.plain = (int, bool, float, str, type(None), torch.dtype, triton.language.dtype)
        knobs, self.driver = triton.knobs, triton.runtime.driver
        hooks = [knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook]
        hooks = [getattr(hook, "calls", hook) for hook in hooks] + [getattr(fn, "pre_run_hooks", None)]
        # What the program sets is in these, and the hooks that it adds.
        self.settings = (knobs.runtime.__dict__, knobs.compilation.__dict__, *hooks)

    def __getitem__(self, grid):
        if not self.is_direct or torch.compiler.is_compiling():
            return self.fn[grid]
        return lambda *arguments, **named: self.launch(grid, arguments, named)

    def launch(self, grid, arguments, named):
        types = (len(arguments), *named, *map(type, arguments), *map(type, named.values()))
        form = self.forms.get(types)
        if form is None:
            form = self.forms[types] = self.form_of(arguments, named), {}
        read, versions = form
        if read is None or any(self.settings) or (self.kernel.used_global_vals and self.is_changed()):
            return self.fn[grid](*arguments, **named)
        key, addresses, values = read(*arguments, **named)
        device = CURRENT_DEVICE
        version = versions.get((device, key))
        if addresses % 16:
            return self.fn[grid](*arguments, **named)
        if version is None:
            return self.searched(grid, arguments, named, versions, (device, key))
        compiled, rest = version
        for place, name, value in rest:
            values[place] = value
        if callable(grid):
            bound = dict(zip(self.names, arguments))
            bound.update(named)
            for _, name, value in rest:
                bound[name] = value
            grid = grid(bound)
        x, y, z = (*grid, 1, 1)[:3]
        stream = self.driver.active.get_current_stream(device)
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)
        return compiled

    def is_changed(self):
        """Whether global variables that the kernel reads have other values than when it was compiled."""
        used = self.kernel.used_global_vals.items()
        return any(space.get(name) != value for (name, _), (value, space) in used)

    def form_of(self, arguments, named):
        """Reads launches with arguments of these types: key, all addresses in one, and values for the driver."""
        given = [*zip(self.names, arguments), *named.items()]
        values, keys, tensors = dict.fromkeys(self.names), [], []
        for name, value in given:
            is_variable, is_value = name in self.variables, name not in self.variables or name in self.by_value
            if is_variable and isinstance(value, TENSOR_TYPES):
BASE_OF_WRAPPER                layout = f", {name}.shape, {name}.stride()" if is_value else ""
                keys.append(f"KEY_OF_TENSOR{layout}")
                tensors.append(name)
                values[name] = f"ADDRESS
                continue
            if type(value) not in self.plain or (is_variable and isinstance(value, (str, torch.dtype))):
                return None
            if is_value:
                # 0.0 equals -0.0, and NaN equals nothing.
                keys.append(f"{name}.hex()" if isinstance(value, float) else name)
            elif type(value) is int:
                # 0 stands for all multiples of 16 and 2 for other integers except 1.
                is_short = f"-(2**31) <= {name} < 2**31"
                keys.append(f"{name} % 16 and ({name} == 1 or 2) if {is_short} else ({name} % 16 == 0, {name} >> 63)")
            values[name] = name
        names = [name for name, _ in given]
        if not tensors or len(arguments) > len(self.names) or len({*names}) < len(names):
            return None
        if not all(map(str.isidentifier, names)):
            return None
        addresses = " | ".join(f"(of_{name} := {name}.data_ptr())" for name in tensors)
        bound = ", ".join(str(values[name]) for name in self.names)
        key = ", ".join([FIRST_KEY*keys])
        return eval(f"lambda {', '.join(names)}: (({key},), {addresses}, [{bound}])")

    def searched(self, grid, arguments, named, versions, key):
        passed = {}  # what the autotuner and heuristics pass to the kernel at last
        self.kernel.pre_run_hooks.append(lambda *args, **kwargs: passed.update(kwargs))
        try:
            compiled = self.fn[grid](*arguments, **named)
        finally:
            self.kernel.pre_run_hooks.pop()
        if isinstance(compiled, triton.compiler.CompiledKernel):
            if len(versions) == 1000:
                versions.clear()
            rest = [(i, p.name, passed.get(p.name, p.default)) for i, p in enumerate(self.kernel.params)]
            rest = [item for item in rest[len(arguments) :] if item[1] not in named]
            versions[key] = compiled, rest
        return compiled
'''


def launch_helper(name: str, *, on_one_gpu: bool) -> str:
    """Source of the helper.

    Args:
        name: of its class.
        on_one_gpu: all tensors are on the current GPU, as the guards of generated launchers ask.
    """
    if on_one_gpu:
        parts = {
            "CURRENT_DEVICE": "key[0]",
            "FIRST_KEY": 'f"{tensors[0]}.get_device()", ',
            "TENSOR_TYPES": "torch.Tensor",
            "BASE_OF_WRAPPER": "",
            "KEY_OF_TENSOR": "{name}.dtype",
            "ADDRESS": 'of_{name}"',
        }
    else:
        parts = {
            "CURRENT_DEVICE": "self.driver.active.get_current_device()",
            "FIRST_KEY": "",
            "TENSOR_TYPES": "(torch.Tensor, triton.runtime.jit.TensorWrapper)",
            "BASE_OF_WRAPPER": """\
                base = "" if isinstance(value, torch.Tensor) else ".base"  # of triton.reinterpret
""",
            "KEY_OF_TENSOR": "{name}.dtype, (at_{name} := {name}{base}.get_device())",
            "ADDRESS": 'of_{name} if at_{name} >= 0 else {name}"  # the driver checks memory of the host',
        }
    parts["HELPER"] = name
    return re.sub("|".join(parts), lambda found: parts[found[0]], _HELPER)


DIRECT_LAUNCHES = launch_helper(NAME, on_one_gpu=True)
"""Source of the helper of generated launchers."""


def launched_directly(kernel: str) -> str:
    """The launcher's parameter for a kernel. Its default launches directly; the operator passes ``wrap_triton(kernel)``."""
    return f"{kernel}={NAME}({kernel})"


def without_direct_launches(launcher: str) -> str:
    """The source of a launcher with plain kernels as the defaults of its parameters."""
    return re.sub(rf"\b(\w+)={NAME}\(\1\)", r"\1=\1", launcher)
