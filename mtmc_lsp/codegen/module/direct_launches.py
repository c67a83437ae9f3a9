"""The helper with which generated launchers launch kernels: it keeps compiled kernels and launches them directly.

``kernel[grid](...)`` searches for the compiled kernel in every launch: Triton specialises all arguments and renders the
options as text. That is about half of the host time of a launch, 23 us on an H100 host with Triton 3.6, and many kernels
take less on the GPU. The object that a launch returns launches the same version again: ``compiled[grid](...)``, as in
Triton's tutorial on fused softmax.

All launchers use the helper, also those of large kernels. Whether the host or the GPU takes longer depends on the sizes
of a call and on the work that is queued before it, and the host is free earlier in any case.
"""

from __future__ import annotations

import re

NAME = "_DirectLaunches"
DIRECT_LAUNCHES = f'''class {NAME}:
    """A kernel whose compiled versions are launched directly, as ``compiled[grid](...)``.

    ``kernel[grid](...)`` searches for the compiled version in each launch: 23 us on an H100 host, 12 us without.
    Here a version is kept for all that Triton specialises on: device and dtypes of tensors, whether integers are 1,
    multiples of 16 or beyond 32 bits, constants and options. Launches with unaligned tensors are left to Triton.
    """

    def __init__(self, kernel):
        self.kernel, self.versions = kernel, {{}}
        # An autotuner chooses versions itself. For AMD's GPUs Triton also specialises on the size of tensors.
        self.is_direct = isinstance(kernel, triton.JITFunction) and torch.version.hip is None

    def __getitem__(self, grid):
        if not self.is_direct or callable(grid) or torch.compiler.is_compiling():
            return self.kernel[grid]
        return lambda *arguments, **constants: self.launch(grid, arguments, constants)

    def launch(self, grid, arguments, constants):
        # Triton tells apart 1, 1.0 and True, which are equal in Python.
        key = [*constants, None, *constants.values(), *map(type, constants.values())]
        tensor, addresses = None, 0
        for argument in arguments:
            if type(argument) is int:
                if -(2**31) <= argument < 2**31:
                    # 0 stands for all multiples of 16 and 2 for other integers except 1.
                    key.append(1 if argument == 1 else argument % 16 and 2)
                else:
                    key.append((argument % 16 == 0, argument // 2**63))
            elif isinstance(argument, torch.Tensor):
                key.append(argument.dtype)
                tensor, addresses = argument, addresses | argument.data_ptr()
            else:
                key.append(type(argument))
        device = None if tensor is None else tensor.get_device()
        key = (device, *key)
        version = self.versions.get(key)
        settings = triton.knobs.runtime.__dict__ or triton.knobs.compilation.__dict__  # those that the program changed
        if version is None or addresses % 16 or settings or self.kernel.pre_run_hooks:
            compiled = self.kernel[grid](*arguments, **constants)
            if not (addresses % 16 or settings) and self.is_complete(key, compiled, arguments, constants):
                self.versions[key] = compiled, [constants[name] for name in self.kernel.arg_names[len(arguments) :]]
        else:
            compiled, values = version
            stream = triton.runtime.driver.active.get_current_stream(device)
            compiled[(*grid, 1, 1)[:3]](*arguments, *values, stream=stream)

    def is_complete(self, key, compiled, arguments, constants) -> bool:
        """Whether the key holds all that the compiled version depends on."""
        return (
            isinstance(compiled, triton.compiler.CompiledKernel)
            and key[0] is not None
            and not self.kernel.used_global_vals  # Triton compares these in every launch
            and all(isinstance(item, torch.Tensor) or type(item) in (int, float, bool) for item in arguments)
            # 0.0 equals -0.0, and NaN equals nothing.
            and not any([isinstance(value, float) for value in constants.values()])
            and not any([item.is_constexpr for item in self.kernel.params[: len(arguments)]])
            and all(item.is_constexpr and item.name in constants for item in self.kernel.params[len(arguments) :])
        )
'''
"""Source of the helper."""


def launched_directly(kernel: str) -> str:
    """The launcher's parameter for a kernel. Its default launches directly; the operator passes ``wrap_triton(kernel)``."""
    return f"{kernel}={NAME}({kernel})"


def without_direct_launches(launcher: str) -> str:
    """The source of a launcher with plain kernels as the defaults of its parameters."""
    return re.sub(rf"\b(\w+)={NAME}\(\1\)", r"\1=\1", launcher)
