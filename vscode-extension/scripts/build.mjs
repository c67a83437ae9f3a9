// Bundles the extension into one file. `--production` makes what is published: small, and with the licence beside it.
import { copyFileSync, rmSync } from "node:fs";
import { build } from "esbuild";

const production = process.argv.includes("--production");
rmSync("dist", { recursive: true, force: true });
await build({
  entryPoints: ["src/extension.ts"],
  bundle: true,
  outfile: "dist/extension.js",
  platform: "node",
  format: "cjs",
  target: "node20",
  external: ["vscode"],
  minify: production,
  sourcemap: !production,
  logLevel: "warning",
});
// The walkthrough's example is the one that the repository's own tests optimise.
copyFileSync("../examples/rmsnorm_residual.py", "dist/rmsnorm_residual.py");
if (production) {
  copyFileSync("../LICENSE", "LICENSE");
}
