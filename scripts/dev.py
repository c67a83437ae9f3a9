"""Set up a fresh machine and run the demo or the tests. Needs only the standard library and Python 3.10 or later.

    python3 scripts/dev.py setup | demo | test | test-all | e2e

Creates ``.venv`` in the checkout, without sudo. ``e2e`` tests the VS Code extension in a real VS Code; it also installs Debian
packages, and exits with 3 if that is not possible. Without a CUDA GPU, a CPU build of torch is preferred if pip can find one.
Further arguments are passed to ``mtmc optimize`` (demo) or pytest (test).
"""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.parse
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv"
PYTHON = FOLDER / "bin" / "python"
MIN_TORCH = (2, 11)
MAX_CORES = 8
"""Limit for parallel tests; more cores do not help."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYPI = "https://pypi.org/simple"
EXIT_ENVIRONMENT = 3
"""Exit code if a requirement of the machine is missing, as opposed to an error in the code."""
DEMO = "examples/rmsnorm_residual.py::rmsnorm_residual"


def main() -> int:
    """Run the command given by the first argument."""
    command, *rest = sys.argv[1:] or ["setup"]
    if command not in ("setup", "demo", "test", "test-all", "e2e"):
        print(__doc__, file=sys.stderr)
        return 2
    set_up()
    if command == "demo":
        return run(PYTHON, "-m", "mtmc_lsp", "optimize", DEMO, *rest)
    if command == "e2e":
        return end_to_end(rest)
    if command == "setup":
        return 0
    return test("not gpu" if command == "test-all" else "not gpu and not slow", rest)


def worker_count() -> str:
    """Number of parallel tests: one more than there are cores, because some wait. Each uses up to 2 GB of memory."""
    return str(min(os.cpu_count() or 1, MAX_CORES) + 1)


def test(marks: str, arguments: list[str]) -> int:
    """Run linter, type checker, the tests that ``marks`` selects, and the extension's tests; all run.

    Returns:
        The exit code of the first that fails, or 0.
    """
    codes = [
        run(PYTHON, "-m", "ruff", "check", "."),
        run(PYTHON, "-m", "ruff", "format", "--check", "."),
        run(PYTHON, "-m", "mypy"),
        run(PYTHON, "-m", "pytest", "-n", worker_count(), "-m", marks, *arguments),
    ]
    extension = ROOT / "vscode-extension"
    # Only if node_modules exists: other developers need neither node nor these packages.
    if shutil.which("npm") and (extension / "node_modules").is_dir():
        codes.append(run("npm", "--prefix", extension, "test"))
    return next((code for code in codes if code), 0)


def end_to_end(arguments: list[str]) -> int:
    """Run the extension's unit tests, and the packaged extension in a real VS Code; the exit code is the first failure's."""
    extension = ROOT / "vscode-extension"
    code = run("bash", extension / "e2e" / "setup.sh")
    if code:
        return code
    folder = (extension / ".e2e" / "node-folder").read_text().strip()
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    npm = ("npm", "--prefix", extension)
    if code := run(*npm, "ci", "--no-audit", "--no-fund", **path):
        if run(*npm, "view", "typescript", "version", **path) == 0:
            # The registry is reachable, so our package list is wrong.
            return code
        print("the end-to-end tests cannot be run here: the npm registry is not reachable", file=sys.stderr)
        return EXIT_ENVIRONMENT
    for command in (("test",), ("run", "package"), ("run", "e2e", "--", *arguments)):
        code = run(*npm, *command, **path)
        if code:
            return code
    return 0


def run(*command: object, **variables: str) -> int:
    """Run a command in the checkout with additional environment variables, and return its exit code."""
    sys.stdout.flush()
    environment = {**os.environ, **variables}
    return subprocess.run([str(part) for part in command], cwd=ROOT, env=environment, check=False).returncode


# Set-up --------------------------------------------------------------------------------------------------------------


def set_up() -> None:
    """Create the environment, unless it already exists for the current pyproject.toml."""
    if sys.version_info < (3, 10):  # noqa: UP036  (the user's Python may be older)
        sys.exit("mtmc-lsp needs Python 3.10 or later; for example run: python3.12 scripts/dev.py")
    stamp = FOLDER / "mtmc-stamp"
    expected_stamp = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == expected_stamp:
        return
    if not PYTHON.exists():
        venv.create(FOLDER, with_pip=False, symlinks=True)
    install_pip()
    if not has("torch"):
        install_torch()
    # CUDA builds of torch include triton; other builds need it listed here.
    pip("install", "-e", ".[dev]", "numpy>=1.26", "triton>=3.6")
    stamp.write_text(expected_stamp)


def has(module: str) -> bool:
    """Whether the environment can import a module."""
    process = subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True, check=False)
    return process.returncode == 0


def pip(*arguments: str) -> None:
    """Run the environment's pip; exit on failure."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    print("$", " ".join(command), flush=True)
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit(f"failed: {' '.join(command)}")


def install_pip() -> None:
    """Install pip in the environment: from ensurepip, from another pip on this machine, or from a downloaded wheel.

    Debian's python3 comes without ensurepip unless python3-venv is installed.
    """
    if has("pip"):
        return
    if subprocess.run([PYTHON, "-m", "ensurepip", "--default-pip"], capture_output=True, check=False).returncode == 0:
        return
    if shutil.which("pip3") and run("pip3", "--python", PYTHON, "install", "pip") == 0:
        return
    wheel = fetch_pip()
    # A wheel is a zip file, which Python can run.
    if run(PYTHON, wheel / "pip", "install", "--no-index", wheel):
        sys.exit("could not install pip into .venv; install python3-venv, or pip, and run this again")
    wheel.unlink()


def fetch_pip() -> Path:
    """Download the newest pip wheel from the package index that pip is configured for."""
    page = f"{index_url().rstrip('/')}/pip/"
    context = ssl.create_default_context(cafile=pip_setting("cert") or None)
    try:
        with urllib.request.urlopen(page, timeout=60, context=context) as response:
            links: list[tuple[str, str, str]] = re.findall(
                r'href="([^"]+/(pip-([0-9.]+)-py3-none-any\.whl)[^"]*)"', response.read().decode()
            )
        if not links:
            sys.exit(f"{page} contains no pip; install python3-venv, or pip, and run this again")
        href, name, _ = max(links, key=lambda link: [int(part) for part in link[2].split(".")])
        with urllib.request.urlopen(urllib.parse.urljoin(page, href), timeout=120, context=context) as response:
            content = response.read()
    except OSError as error:
        sys.exit(f"pip is missing, and {page} cannot be reached: {error}; install python3-venv, and run this again")
    checksum = re.search(r"#sha256=([0-9a-f]{64})", href)
    if checksum and hashlib.sha256(content).hexdigest() != checksum[1]:
        sys.exit(f"{name} has a wrong checksum; run this again")
    path = FOLDER / name
    path.write_bytes(content)
    return path


def index_url() -> str:
    """The package index that pip uses."""
    return pip_setting("index-url") or PYPI


def pip_setting(name: str) -> str:
    """A setting of pip, from its environment variables or configuration files."""
    variable = os.environ.get(f"PIP_{name.upper().replace('-', '_')}", "")
    if variable:
        return variable
    home = Path.home()
    files = ["/etc/pip.conf", home / ".pip/pip.conf", home / ".config/pip/pip.conf", os.environ.get("PIP_CONFIG_FILE")]
    config = configparser.ConfigParser(interpolation=None)
    config.read([str(file) for file in files if file], encoding="utf-8")
    return config.get("global", name, fallback="")


# torch ---------------------------------------------------------------------------------------------------------------


def install_torch() -> None:
    """Install torch first and separately: a plain requirement installs gigabytes of CUDA packages, even without a GPU."""
    requirement = f"torch>={'.'.join(map(str, MIN_TORCH))}"
    if has_gpu():
        pip("install", requirement)
        return
    cpu_requirement = cpu_build()
    if cpu_requirement:
        pip("install", cpu_requirement)
    elif is_available(requirement, "--index-url", CPU_INDEX):
        pip("install", requirement, "--index-url", CPU_INDEX)
    else:
        print("no CPU build of torch was found; installing the default build, which is large", flush=True)
        pip("install", requirement)


def has_gpu() -> bool:
    """Whether an NVIDIA driver is installed."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def cpu_build() -> str:
    """The newest ``torch==X+cpu`` that pip finds in its configured index; empty if there is none."""
    output = pip_quietly("index", "versions", "torch")
    builds = re.findall(r"\b(\d+)\.(\d+)\.(\d+)\+cpu\b", output)
    versions = [numbers for numbers in (tuple(map(int, build)) for build in builds) if numbers >= MIN_TORCH]
    return f"torch=={'.'.join(map(str, max(versions)))}+cpu" if versions else ""


def is_available(*arguments: str) -> bool:
    """Whether pip can find a package, with a short timeout for indexes that do not respond."""
    return bool(pip_quietly("install", "--dry-run", "--no-deps", "--timeout", "10", "--retries", "0", *arguments))


def pip_quietly(*arguments: str) -> str:
    """Output of pip; empty if it fails or takes too long."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return output.stdout if output.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
