// Bundles the extension into one file. `--production` makes what is published: small, and with the licence beside it.
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
// The walkthrough's example is the one that the repository's own tests optimise.
copyFileSync("../examples/rmsnorm_residual.py", "dist/rmsnorm_residual.py");
if (production) {
  copyFileSync("../LICENSE", "LICENSE");
}
