"""Source of the helper that launches compiled kernels directly. Workers read its name, so this module needs no other."""

from __future__ import annotations

NAME = "DirectLaunch"

HELPER = f'''class {NAME}:
    """A kernel whose compiled versions are launched directly: about half of a launch on the host is the search for them.

    A version is kept for all that Triton specialises on: device and dtypes of tensors, whether integers are 1, multiples of
    16 or beyond 32 bits, constants and options. An autotuner and heuristics may read all arguments, so their values and the
    layouts of tensors count, too. Launches with unaligned tensors or changed settings are left to Triton.
    """

    def __init__(self, fn):
        self.fn, self.versions, hooks = fn, {{}}, []
        while hasattr(fn, "fn") and not isinstance(fn, triton.JITFunction):
            hooks += [config.pre_hook for config in getattr(fn, "configs", [])]
            fn = fn.fn
        self.kernel, self.is_wrapped = fn, fn is not self.fn
        # For AMD's GPUs Triton also specialises on the size of tensors.
        self.is_direct = isinstance(fn, triton.JITFunction) and torch.version.hip is None and not any(hooks)
        self.parameters = fn.params if self.is_direct else []
        self.variables = {{p.name for p in self.parameters if not p.is_constexpr}}

    def __getitem__(self, grid):
        if not self.is_direct or torch.compiler.is_compiling():
            return self.fn[grid]
        return lambda *arguments, **named: self.launch(grid, arguments, named)

    def launch(self, grid, arguments, named):
        device, addresses, key = None, 0, [len(arguments), *named]
        values = [*zip([p.name for p in self.parameters], arguments), *named.items()]
        for name, value in values:
            if name in self.variables and isinstance(value, torch.Tensor):
                key += (value.dtype, value.shape, value.stride()) if self.is_wrapped else (value.dtype,)
                device, addresses = value.get_device(), addresses | value.data_ptr()
            elif name not in self.variables or self.is_wrapped:
                key += type(value), value  # Triton tells apart 1, 1.0 and True, which are equal in Python
            elif type(value) is int:
                # 0 stands for all multiples of 16 and 2 for other integers except 1.
                is_long = not -(2**31) <= value < 2**31
                key.append((value % 16 == 0, value // 2**63) if is_long else 1 if value == 1 else value % 16 and 2)
            else:
                key.append(type(value))
        key = (device, *key)
        try:
            version = self.versions.get(key)
        except TypeError:  # a constant that cannot be a key
            return self.fn[grid](*arguments, **named)
        settings = triton.knobs.runtime.__dict__ or triton.knobs.compilation.__dict__  # those that the program changed
        if addresses % 16 or settings or self.kernel.pre_run_hooks:
            return self.fn[grid](*arguments, **named)
        if version is None:
            return self.first_launch(grid, arguments, named, device, key, values)
        compiled, rest = version
        bound = [*arguments, *[named.get(name, value) for name, value in rest]]
        if callable(grid):
            grid = grid(dict(zip([p.name for p in self.parameters], bound)))
        stream = triton.runtime.driver.active.get_current_stream(device)
        compiled[(*grid, 1, 1)[:3]](*bound, stream=stream)
        return compiled

    def first_launch(self, grid, arguments, named, device, key, values):
        passed = {{}}  # what the autotuner and heuristics pass to the kernel at last
        self.kernel.pre_run_hooks.append(lambda *args, **kwargs: passed.update(kwargs))
        try:
            compiled = self.fn[grid](*arguments, **named)
        finally:
            self.kernel.pre_run_hooks.pop()
        if self.is_complete(device, compiled, values):
            if len(self.versions) == 1000:
                self.versions.clear()
            rest = self.parameters[len(arguments) :]
            self.versions[key] = compiled, [
                (p.name, None if p.name in named else passed.get(p.name, p.default)) for p in rest
            ]
        return compiled

    def is_complete(self, device, compiled, values) -> bool:
        """Whether the key holds all that the compiled version depends on."""
        return (
            isinstance(compiled, triton.compiler.CompiledKernel)
            and device is not None
            and not self.kernel.used_global_vals  # Triton compares these in every launch
            and all(
                value is None or isinstance(value, torch.Tensor) or type(value) in (int, float, bool)
                for name, value in values
                if name in self.variables
            )
            # 0.0 equals -0.0, and NaN equals nothing.
            and not any(isinstance(value, float) for name, value in values if name not in self.variables)
        )
'''
"""Source of the helper, which the file gets once."""
