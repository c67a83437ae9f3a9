#!/usr/bin/env bash
# A real VS Code for the end-to-end test, from the npm registry alone: code-server, built here, in vscode-extension/.e2e.
# Needs Node 20, a C++ compiler, libkrb5-dev and chromium. Takes a few minutes, once.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .e2e && cd .e2e
export npm_config_nodedir="${npm_config_nodedir:-$(dirname "$(dirname "$(readlink -f "$(command -v node)")")")}"
echo '{"private": true}' > package.json
npm install --no-audit --no-fund --ignore-scripts code-server@4.100.3 playwright-core@1.50
npm rebuild argon2
cd node_modules/code-server/lib/vscode
npm install --no-audit --no-fund --omit=dev --ignore-scripts
# node-pty's own check after its build fails here, and it works all the same.
npm rebuild node-pty @vscode/spdlog native-watchdog kerberos @parcel/watcher || true
ln -sfn node_modules node_modules.asar
cd extensions && npm install --no-audit --no-fund --omit=dev --ignore-scripts
