-- Neovim 0.7 or later without plugins: open a file, request code actions, optimise, keep, undo.
-- Every step waits for its condition; the last line of the output names the last completed step.
local done = "started"
local ok, problem = pcall(function()
  local command = vim.fn.json_decode(vim.env.MTMC_SERVER)
  local file = vim.env.MTMC_FILE
  vim.cmd("edit " .. file)
  local buffer = vim.api.nvim_get_current_buf()
  local messages = {}
  local client = vim.lsp.start_client({
    name = "mtmc",
    cmd = command,
    root_dir = vim.fn.fnamemodify(file, ":h"),
    init_options = { trusted = true },
    handlers = {
      ["window/showMessage"] = function(_, params) table.insert(messages, params.message) end,
      ["workspace/codeLens/refresh"] = function() return vim.NIL end,
    },
  })
  vim.lsp.buf_attach_client(buffer, client)
  local function until_true(what, condition)
    if not vim.wait(60000, condition, 20) then error("timeout: " .. what .. "\n" .. vim.inspect(messages)) end
    done = what
  end
  local function request(method, params)
    local answers = vim.lsp.buf_request_sync(buffer, method, params, 20000)
    assert(answers and answers[client], method .. " has no answer")
    assert(not answers[client].err, vim.inspect(answers[client].err))
    return answers[client].result
  end
  until_true("attached", function() return vim.lsp.buf_is_attached(buffer, client) and vim.lsp.get_client_by_id(client).initialized end)

  local function text() return table.concat(vim.api.nvim_buf_get_lines(buffer, 0, -1, false), "\n") end
  local function actions()
    local line = vim.fn.search("^def f", "w") - 1
    local at = { line = line, character = 0 }
    local found = request("textDocument/codeAction", {
      textDocument = { uri = vim.uri_from_bufnr(buffer) },
      range = { start = at, ["end"] = at },
      context = { diagnostics = {} },
    })
    local by_kind = {}
    for _, action in ipairs(found) do by_kind[action.kind] = action end
    return by_kind
  end
  local function run(kind)
    local action = actions()[kind]
    assert(action, kind .. " is not offered")
    if not action.command then action = request("codeAction/resolve", action) end
    return request("workspace/executeCommand", { command = action.command.command, arguments = action.command.arguments })
  end

  local before = text()
  run("refactor.rewrite.mtmc.optimize")
  until_true("optimized", function()
    for _, message in ipairs(messages) do
      if message:find("improved") or message:find("unmeasured") then return true end
    end
  end)
  assert(text() == before, "the file changed before keep")
  run("refactor.rewrite.mtmc.review.keep")
  until_true("kept", function() return text():find("@triton.jit", 1, true) ~= nil end)
  local lenses = request("textDocument/codeLens", { textDocument = { uri = vim.uri_from_bufnr(buffer) } })
  assert(#lenses > 0, "no lens")
  vim.cmd("write")
  vim.cmd("silent undo")
  until_true("undone by the editor", function() return text() == before end)
  vim.cmd("silent redo")
  until_true("redone", function() return text() ~= before end)
  run("refactor.rewrite.mtmc.review.undoAll")
  until_true("undone", function() return text() == before end)
  done = "all"
end)
io.stdout:write((ok and "" or tostring(problem) .. "\n") .. "came to: " .. done .. "\n")
vim.cmd(ok and "qall!" or "cquit!")
