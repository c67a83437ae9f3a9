// Bundles the extension into one file. `--production` creates the published bundle: minified, with the licence.
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
}
