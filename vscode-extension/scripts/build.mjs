// Bundles the extension into one file. `--production` creates the published bundle: minified, with the licence and the language server.
import { spawnSync } from "node:child_process";
import { copyFileSync, rmSync } from "node:fs";
import { build } from "esbuild";

const production = process.argv.includes("--production");
rmSync("dist", { recursive: true, force: true });
const common = { bundle: true, minify: production, sourcemap: !production, logLevel: "warning" };
await build({
  ...common,
  entryPoints: ["src/extension.ts"],
  outfile: "dist/extension.js",
  platform: "node",
  format: "cjs",
  target: "node20",
  external: ["vscode"],
});
await build({
  ...common,
  entryPoints: ["src/webview/report.ts"],
  outfile: "dist/report.js",
  platform: "browser",
  format: "iife",
  target: "chrome122",
});
// The walkthrough uses the same example as the repository's tests.
copyFileSync("../examples/rmsnorm_residual.py", "dist/rmsnorm_residual.py");
if (production) {
  copyFileSync("../LICENSE", "LICENSE");
  const python = process.env.MTMC_PYTHON ?? "../.venv/bin/python";
  const { status, error } = spawnSync(python, ["scripts/bundle_server.py"], { stdio: "inherit" });
  if (status !== 0) throw error ?? new Error("the language server could not be bundled; run `python3 scripts/dev.py setup` in the repository first");
}
