"""The schedule: which ATen nodes form which kernel, and how each kernel runs. Small, typed, serialisable.

A macro action is a function ``schedule -> schedule``; the built-in coder renders ``graph + schedule`` as source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtmc_lsp.schedule.configs import KernelConfig

MOST_BESIDE = 8
"""Most kernels that may share a launch."""


@dataclass(frozen=True)
class Rewrite:
    """One rewrite of the graph, by a rule of :mod:`mtmc_lsp.rewrites`."""

    rule: str
    node: str
    """The node that is rewritten, or the named size."""
    detail: tuple[int, ...] = ()
    """Parameters of the rule: the order of a layout's dimensions, a size's value."""


@dataclass(frozen=True)
class KernelPlan:
    """One kernel: the nodes it computes and how."""

    nodes: tuple[str, ...]
    """ATen nodes, in execution order."""
    config: KernelConfig
    """Every choice: tiles, warps, stages, loop, precision, ... Its class is that of the region's kind."""
    recomputed: tuple[str, ...] = ()
    """ATen nodes that this kernel recomputes without writing their values."""

    @property
    def key(self) -> str:
        """Identifies the kernel in its schedule: its last node."""
        return self.nodes[-1]


@dataclass(frozen=True)
class Schedule:
    """All kernels; nodes in no kernel stay torch calls."""

    kernels: tuple[KernelPlan, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    """Applied to the captured graph in this order; kernels name nodes of the rewritten graph."""
    cuda_graph: bool = False
    """Whether the launches of a call are captured once and run as one CUDA graph."""
    side_by_side: tuple[tuple[str, ...], ...] = ()
    """Keys of kernels that share a launch; :attr:`launches` drops keys of removed kernels."""
    loop_kernels: tuple[KernelPlan, ...] = ()
    """Kernels of operations that run for one chunk of rows after another (:mod:`mtmc_lsp.rewrites.row_loops`)."""
    kernel_names: tuple[tuple[str, str], ...] = ()
    """Names in the generated code by the key of the kernel, or the joined keys of a launch; later steps keep them."""

    @property
    def launches(self) -> tuple[tuple[str, ...], ...]:
        """Keys of the kernels of each launch that several share."""
        keys = {kernel.key for kernel in self.kernels}
        present = (tuple(key for key in group if key in keys) for group in self.side_by_side)
        return tuple(group for group in present if len(group) > 1)

    def shares_launch(self, plan: KernelPlan) -> bool:
        """Whether other kernels run in the kernel's launch."""
        return any(plan.key in group for group in self.launches)

    def kernel_of(self, node: str) -> KernelPlan | None:
        """The kernel that computes ``node``, if any."""
        return next((kernel for kernel in self.kernels if node in kernel.nodes), None)

    def with_kernel(self, plan: KernelPlan) -> Schedule:
        """With ``plan`` instead of all kernels that share a node with it."""
        others = tuple(kernel for kernel in self.kernels if not set(kernel.nodes) & set(plan.nodes))
        return replace(self, kernels=(*others, plan))

    def without(self, key: str) -> Schedule:
        """Without the kernel ``key``, whose nodes become torch calls."""
        return replace(self, kernels=tuple(kernel for kernel in self.kernels if kernel.key != key))
