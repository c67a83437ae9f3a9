"""Put the language server with its libraries into ``dist/server``, so that the extension needs neither pip nor a network.

Usage: ``python scripts/bundle_server.py``, or with ``--lock`` to write ``server-libraries.txt`` again, with the newest versions
that pip finds and the hashes of all wheels.

    dist/server/mtmc_lsp                        the package, from its wheel
    dist/server/mtmc-libraries/any              pure Python libraries
    dist/server/mtmc-libraries/linux-x86_64     compiled libraries of a platform, for every Python version
    dist/server/bundle.json                     the version of the server

torch and triton are not part of it: they are the user's.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

EXTENSION = Path(__file__).resolve().parent.parent
ROOT = EXTENSION.parent
LOCK = EXTENSION / "server-libraries.txt"
SERVER = EXTENSION / "dist" / "server"
CACHE = EXTENSION / "build" / "wheels"
"""Downloaded wheels, in a folder named by the hash of the lock file."""
PURE = ("attrs", "cattrs", "exceptiongroup", "lsprotocol", "nvidia-ml-py", "pygls", "tomli", "typing-extensions")
COMPILED = ("tree-sitter", "tree-sitter-python")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PLATFORMS = {
    "linux-x86_64": ("manylinux2014_x86_64", "manylinux_2_28_x86_64"),
    "linux-aarch64": ("manylinux2014_aarch64", "manylinux_2_28_aarch64"),
}
"""The platforms for which triton has wheels, with pip's names. The folders are named like ``sys.platform`` and the machine."""
UNUSED = (".pyi", ".c", "/RECORD")
"""Ends of files that nothing reads at run time. Licences stay."""
MAX_BYTES = 12_000_000
"""Limit for the compressed size."""


def main() -> None:
    """Write the bundle, or the lock file."""
    if sys.argv[1:] == ["--lock"]:
        with tempfile.TemporaryDirectory() as folder:
            download(Path(folder), [*PURE, *COMPILED])
            LOCK.write_text(locked(Path(folder).iterdir()))
        return
    shutil.rmtree(SERVER, ignore_errors=True)
    package = build_wheel()
    unpack(package, SERVER)
    # The metadata belong to the libraries: importlib.metadata searches sys.path, which does not contain the package's folder.
    for metadata in SERVER.glob("*.dist-info"):
        shutil.move(metadata, SERVER / "mtmc-libraries" / "any" / metadata.name)
    for wheel in sorted(wheels().iterdir()):
        unpack(wheel, SERVER / "mtmc-libraries" / folder_of(wheel.name))
    version = package.name.split("-")[1]
    (SERVER / "bundle.json").write_text(json.dumps({"version": version}) + "\n")
    report(version)


def wheels() -> Path:
    """The folder with the locked wheels; downloads them if it is missing."""
    text = LOCK.read_text()
    folder = CACHE / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        requirements = [line for line in text.replace("\\\n", "").splitlines() if line and not line.startswith("#")]
        download(partial, requirements, "--require-hashes")
        partial.rename(folder)
    return folder


def download(folder: Path, requirements: Sequence[str], *options: str) -> None:
    """Download the wheels of requirements for every platform and Python version."""
    folder.mkdir(parents=True, exist_ok=True)
    pure = [line for line in requirements if name_of(line) in PURE]
    compiled = [line for line in requirements if name_of(line) in COMPILED]
    # tomli also has compiled wheels; the pure one serves every Python version.
    fetch(folder, pure, ("any",), PYTHONS[0], "py", "--abi", "none", *options)
    for tags in PLATFORMS.values():
        for python in PYTHONS:
            fetch(folder, compiled, tags, python, "cp", *options)


def fetch(
    folder: Path, requirements: Sequence[str], tags: Iterable[str], python: str, implementation: str, *options: str
) -> None:
    """Download the wheels of requirements for one platform and Python version."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements))
        file.flush()
        platforms = [word for tag in tags for word in ("--platform", tag)]
        target = [*platforms, "--python-version", python, "--implementation", implementation]
        pip("download", "--no-deps", "--only-binary", ":all:", *target, *options, "-d", folder, "-r", file.name)


def build_wheel() -> Path:
    """The project's wheel, in a new folder."""
    folder = CACHE / "mtmc-lsp"
    shutil.rmtree(folder, ignore_errors=True)
    pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    return next(folder.glob("*.whl"))


def pip(*arguments: object) -> None:
    """Run this interpreter's pip; exit on failure."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *map(str, arguments)]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"failed: {' '.join(command)}")


def locked(files: Iterable[Path]) -> str:
    """The text of the lock file for downloaded wheels."""
    hashes: dict[str, list[str]] = {}
    for file in sorted(files):
        name, version = file.name.split("-")[:2]
        requirement = f"{name.replace('_', '-')}=={version}"
        hashes.setdefault(requirement, []).append(hashlib.sha256(file.read_bytes()).hexdigest())
    lines = [
        " \\\n".join([name, *(f"    --hash=sha256:{digest}" for digest in digests)]) for name, digests in hashes.items()
    ]
    return "\n".join(["# Written by `python scripts/bundle_server.py --lock`.", *lines, ""])


def name_of(requirement: str) -> str:
    """The package name of a requirement."""
    return re.split(r"[=\s]", requirement)[0]


def folder_of(wheel: str) -> str:
    """The folder in ``mtmc-libraries`` for the files of a wheel."""
    tags = wheel.removesuffix(".whl").rpartition("-")[2].split(".")
    return next((platform for platform, names in PLATFORMS.items() if set(names) & set(tags)), "any")


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack a wheel over the wheels of the same package for other Python versions, whose extension modules have other names."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.is_dir() or member.filename.endswith(UNUSED):
                continue
            path, content = folder / member.filename, archive.read(member)
            if path.exists() and path.read_bytes() != content and path.name != "WHEEL":
                sys.exit(f"{member.filename} of {wheel.name} differs from that of another wheel")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def report(version: str) -> None:
    """Print the sizes; exit if the bundle is too large."""
    parts = {
        "mtmc_lsp": SERVER / "mtmc_lsp",
        **{path.name: path for path in sorted((SERVER / "mtmc-libraries").iterdir())},
    }
    sizes = {name: compressed(path) for name, path in parts.items()}
    print(f"server {version}, compressed:", ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items()))
    if sum(sizes.values()) > MAX_BYTES:
        sys.exit(f"the server has {sum(sizes.values())} bytes, more than {MAX_BYTES}")


def compressed(folder: Path) -> int:
    """The size of the files of a folder in a zip file."""
    with tempfile.TemporaryFile() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in folder.rglob("*"):
                archive.write(path, path.relative_to(folder))
        return file.tell()


if __name__ == "__main__":
    main()
