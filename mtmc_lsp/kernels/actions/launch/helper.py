"""The helper that launches compiled kernels directly, as the edit writes it into files with any kernels and launches.

It does more than the one of generated launchers (``mtmc_lsp/codegen/module/direct_launches.py``): autotuners and heuristics,
parameters with defaults, kernels that read global variables, several GPUs, and tensors of other dtypes. Workers read its name,
so this module needs no third-party package.
"""

from __future__ import annotations

NAME = "DirectLaunch"
HELPER = '''class DirectLaunch:
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
        device = self.driver.active.get_current_device()
        version = versions.get((device, key))
        if addresses % 16:
            return self.fn[grid](*arguments, **named)
        if version is None:
            return self.searched(grid, arguments, named, versions, (device, key))
        compiled, rest = version
        for place, name, value in rest:
            values[place] = value
        if callable(grid):
            bound = dict(zip(self.names, arguments), **named)
            grid = grid(bound | {name: value for _, name, value in rest})
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
            if is_variable and isinstance(value, (torch.Tensor, triton.runtime.jit.TensorWrapper)):
                base = "" if isinstance(value, torch.Tensor) else ".base"  # of triton.reinterpret
                layout = f", {name}.shape, {name}.stride()" if is_value else ""
                keys.append(f"{name}.dtype, (at_{name} := {name}{base}.get_device()){layout}")
                tensors.append(name)
                values[name] = f"of_{name} if at_{name} >= 0 else {name}"  # the driver checks memory of the host
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
        is_bound = len(arguments) <= len(self.names) and len({*names}) == len(names)
        if not tensors or not is_bound or not all(map(str.isidentifier, names)):
            return None
        addresses = " | ".join(f"(of_{name} := {name}.data_ptr())" for name in tensors)
        bound = ", ".join(str(values[name]) for name in self.names)
        return eval(f"lambda {', '.join(names)}: (({', '.join(keys)},), {addresses}, [{bound}])")

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
"""Source of the helper, which the file gets once."""
