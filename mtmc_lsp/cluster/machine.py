"""What a worker's results depend on, compared with the user's machine before any job runs."""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp import __version__
from mtmc_lsp.app.bench.runner import visible_devices
from mtmc_lsp.app.interpreter import query_gpus, versions
from mtmc_lsp.app.provenance import PACKAGE
from mtmc_lsp.process.priority import cores_for_job, usable_cores

COMPARED = ("python", "torch", "triton")
CPU = "CPU"
"""The device of a worker without a GPU."""
SLOT = "MTMC_CLUSTER_SLOT"
"""Environment variable of workers without a GPU of a cluster on one machine: the worker's number and their count, as ``2/4``."""


@dataclass(frozen=True)
class Software:
    """The versions that results depend on."""

    python: str
    """Two numbers."""
    torch: str
    """Without the build: a machine without a GPU may have ``+cpu``."""
    triton: str
    mtmc: str
    """The version and a hash of the files of this tool."""

    def difference(self, other: Software) -> str:
        """How another machine differs, such as ``torch 2.12.0 instead of 2.13.0``; empty if it does not."""
        parts = [
            f"{name} {getattr(other, name) or 'missing'} instead of {getattr(self, name)}"
            for name in (*COMPARED, "mtmc")
            if getattr(self, name) != getattr(other, name)
        ]
        return ", ".join(parts)


def software_of(python: str) -> Software:
    """The versions that an interpreter has, and those of this tool.

    Raises:
        EnvironmentNotAble: the interpreter does not run.
    """
    known = versions(python)
    minor = ".".join(known["python"].split(".")[:2])
    return Software(minor, _public(known["torch"]), _public(known["triton"]), f"{__version__} ({package_digest()})")


def _public(version: str) -> str:
    return version.partition("+")[0]


@functools.cache
def package_digest() -> str:
    """A hash of all files of this package."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Hardware:
    """What one worker uses of its host."""

    device: str
    """The value of ``CUDA_VISIBLE_DEVICES`` that selects its GPU; empty without a GPU."""
    kind: str
    """The name of the GPU, or :data:`CPU`. Results of different kinds are kept apart."""
    cores: tuple[int, ...]


def hardware() -> Hardware:
    """The first GPU that this process may use, and an equal part of the host's cores; without a GPU all cores."""
    cores = usable_cores()
    devices = visible_devices()
    gpus = dict(enumerate(query_gpus("uuid,name"))) if devices else {}
    for number, text in gpus.items():
        uuid, _, name = text.partition(", ")
        if devices[0] in (str(number), uuid):
            return Hardware(devices[0], name, tuple(cores_for_job(number, len(gpus), cores)))
    if gpus:
        # A part of a GPU (MIG) has an id that the list of GPUs does not have.
        return Hardware(devices[0], f"{gpus[0].partition(', ')[2]} MIG", tuple(cores))
    job, _, jobs = os.environ.get(SLOT, "0/1").partition("/")
    return Hardware("", CPU, tuple(cores_for_job(int(job), int(jobs), cores)))


def usable_python(named: str, fallback: str) -> str:
    """The interpreter that the user named, if it exists here; otherwise the one that runs the worker."""
    return named if Path(named).is_file() and os.access(named, os.X_OK) else fallback
