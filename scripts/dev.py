"""Set up a fresh machine and run the demo or the tests. Standard library only; Python 3.10 or later.

    python3 scripts/dev.py setup | demo | test | e2e

Makes ``.venv`` in the checkout, without sudo; ``e2e``, which tests the VS Code extension in a real VS Code, installs Debian
packages too, and exits with 3 where it cannot. Where there is no CUDA GPU, a CPU build of torch is preferred if pip can
already find one. Further arguments go to ``mtmc optimize`` (demo) or pytest (test).
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
LEAST_TORCH = (2, 11)
MOST_CORES = 8
"""More are not used by the tests."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYPI = "https://pypi.org/simple"
NOT_ABLE = 3
"""Exit code where the machine, and not the code, is what lacks something."""
DEMO = "examples/rmsnorm_residual.py::rmsnorm_residual"


def main() -> int:
    """Do what the first argument says."""
    command, *rest = sys.argv[1:] or ["setup"]
    if command not in ("setup", "demo", "test", "e2e"):
        print(__doc__, file=sys.stderr)
        return 2
    set_up()
    if command == "demo":
        return run(PYTHON, "-m", "mtmc_lsp", "optimize", DEMO, *rest)
    if command == "e2e":
        return end_to_end(rest)
    return test(rest) if command == "test" else 0


def processes() -> str:
    """How many tests run at a time: one more than there are cores, since some wait; each takes up to 2 GB of memory."""
    return str(min(os.cpu_count() or 1, MOST_CORES) + 1)


def test(arguments: list[str]) -> int:
    """Lint, types, tests, and those of the editor extension; all run, the first failure gives the exit code."""
    codes = [
        run(PYTHON, "-m", "ruff", "check", "."),
        run(PYTHON, "-m", "ruff", "format", "--check", "."),
        run(PYTHON, "-m", "mypy"),
        run(PYTHON, "-m", "pytest", "-n", processes(), "-m", "not gpu", *arguments),
    ]
    extension = ROOT / "vscode-extension"
    # Only where somebody works on it: nobody else needs node, or should wait for its packages.
    if shutil.which("npm") and (extension / "node_modules").is_dir():
        codes.append(run("npm", "--prefix", extension, "test"))
    return next((code for code in codes if code), 0)


def end_to_end(arguments: list[str]) -> int:
    """The extension's own tests, and the packaged extension in a real VS Code; the first failure gives the exit code."""
    extension = ROOT / "vscode-extension"
    code = run("bash", extension / "e2e" / "setup.sh")
    if code:
        return code
    folder = (extension / ".e2e" / "node-folder").read_text().strip()
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    npm = ("npm", "--prefix", extension)
    if code := run(*npm, "ci", "--no-audit", "--no-fund", **path):
        if run(*npm, "view", "typescript", "version", **path) == 0:
            # The registry answers, so it is our list of packages that is wrong.
            return code
        print("the end-to-end tests cannot be run here: the npm registry is out of reach", file=sys.stderr)
        return NOT_ABLE
    for command in (("test",), ("run", "package"), ("run", "e2e", "--", *arguments)):
        code = run(*npm, *command, **path)
        if code:
            return code
    return 0


def run(*command: object, **variables: str) -> int:
    """Run a command in the checkout, with further environment variables; gives its exit code."""
    sys.stdout.flush()
    environment = {**os.environ, **variables}
    return subprocess.run([str(part) for part in command], cwd=ROOT, env=environment, check=False).returncode


# Set-up --------------------------------------------------------------------------------------------------------------


def set_up() -> None:
    """Make the environment, unless it is already there for this pyproject.toml."""
    if sys.version_info < (3, 10):  # noqa: UP036  (whoever runs this may have an older one)
        sys.exit("mtmc-lsp needs Python 3.10 or later; name one: python3.12 scripts/dev.py")
    stamp = FOLDER / "mtmc-stamp"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if not PYTHON.exists():
        venv.create(FOLDER, with_pip=False, symlinks=True)
    install_pip()
    if not has("torch"):
        install_torch()
    # triton comes with a CUDA build of torch, and is asked for here for the others.
    pip("install", "-e", ".[dev]", "numpy>=1.26", "triton>=3.6")
    stamp.write_text(wanted)


def has(module: str) -> bool:
    """Whether the environment can import a module."""
    done = subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True, check=False)
    return done.returncode == 0


def pip(*arguments: str) -> None:
    """Run the environment's pip; end where it fails."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    print("$", " ".join(command), flush=True)
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit(f"failed: {' '.join(command)}")


def install_pip() -> None:
    """pip in the environment: bundled with Python, or of another Python here, or fetched as a wheel.

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
    """The newest pip wheel of the package index that pip is configured for."""
    page = f"{index_url().rstrip('/')}/pip/"
    context = ssl.create_default_context(cafile=pip_setting("cert") or None)
    try:
        with urllib.request.urlopen(page, timeout=60, context=context) as answer:
            links: list[tuple[str, str, str]] = re.findall(
                r'href="([^"]+/(pip-([0-9.]+)-py3-none-any\.whl)[^"]*)"', answer.read().decode()
            )
        if not links:
            sys.exit(f"{page} offers no pip; install python3-venv, or pip, and run this again")
        href, name, _ = max(links, key=lambda link: [int(part) for part in link[2].split(".")])
        with urllib.request.urlopen(urllib.parse.urljoin(page, href), timeout=120, context=context) as answer:
            content = answer.read()
    except OSError as error:
        sys.exit(f"pip is missing, and {page} cannot be reached: {error}; install python3-venv, and run this again")
    wanted = re.search(r"#sha256=([0-9a-f]{64})", href)
    if wanted and hashlib.sha256(content).hexdigest() != wanted[1]:
        sys.exit(f"{name} came damaged; run this again")
    path = FOLDER / name
    path.write_bytes(content)
    return path


def index_url() -> str:
    """Where pip would look for packages."""
    return pip_setting("index-url") or PYPI


def pip_setting(name: str) -> str:
    """A setting of pip's, from its environment variables or its configuration files."""
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
    """torch first and alone: a plain requirement brings gigabytes of CUDA packages to a machine without a GPU."""
    least = f"torch>={'.'.join(map(str, LEAST_TORCH))}"
    if has_gpu():
        pip("install", least)
        return
    local = cpu_build()
    if local:
        pip("install", local)
    elif is_found(least, "--index-url", CPU_INDEX):
        pip("install", least, "--index-url", CPU_INDEX)
    else:
        print("no CPU build of torch was found; the default build is installed, which is large", flush=True)
        pip("install", least)


def has_gpu() -> bool:
    """Whether an NVIDIA driver is there."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def cpu_build() -> str:
    """The newest ``torch==X+cpu`` that pip finds as it is configured; empty where it finds none."""
    done = pip_quietly("index", "versions", "torch")
    builds = re.findall(r"\b(\d+)\.(\d+)\.(\d+)\+cpu\b", done)
    versions = [numbers for numbers in (tuple(map(int, build)) for build in builds) if numbers >= LEAST_TORCH]
    return f"torch=={'.'.join(map(str, max(versions)))}+cpu" if versions else ""


def is_found(*arguments: str) -> bool:
    """Whether pip would find something to install; does not wait long for an index that does not answer."""
    return bool(pip_quietly("install", "--dry-run", "--no-deps", "--timeout", "10", "--retries", "0", *arguments))


def pip_quietly(*arguments: str) -> str:
    """What pip prints; empty where it fails or takes too long."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
