// The extension in a real VS Code, with the real server, on the CPU. Screenshots of each screen, light and dark, go to e2e/shots.
//
//   python3 scripts/dev.py e2e, which installs what is needed; then: npm run package && npm run e2e [-- PART ...]
import { mkdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import { SHOTS } from "./editor.mjs";

const PARTS = ["review", "life", "start", "trust"];
const asked = process.argv.slice(2);
rmSync(SHOTS, { recursive: true, force: true });
mkdirSync(SHOTS, { recursive: true });
let count = 0;
const began = Date.now();

/** The scenarios of a part, one after the other; a failure leaves a picture of the window that it happened in. */
async function scenario(window, name, body) {
  const start = Date.now();
  try {
    await body();
  } catch (error) {
    await window.page.screenshot({ path: join(SHOTS, "failure.png") }).catch(() => undefined);
    console.log(`not ok ${count + 1} - ${name}\n${window.editor.log()}`);
    console.log(`messages: ${JSON.stringify(await window.messages().catch(String))}`);
    throw error;
  }
  console.log(`ok ${++count} - ${name} (${((Date.now() - start) / 1000).toFixed(1)} s)`);
}

for (const part of PARTS) {
  if (asked.length > 0 && !asked.includes(part)) continue;
  const { run } = await import(`./${part}.mjs`);
  await run(scenario);
}
console.log(`${count} scenarios in ${((Date.now() - began) / 1000).toFixed(0)} s`);
