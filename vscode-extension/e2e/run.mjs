// The extension in a real VS Code, with the real server, on the CPU. Screenshots of each screen, light and dark, go to e2e/shots.
//
//   python3 scripts/dev.py e2e, which installs what is needed; then: npm run package && npm run e2e [-- PART ...]
import { mkdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import { SHOTS } from "./editor.mjs";

/** What is timed goes first, and alone. */
const ALONE = ["load"];
/** Parts have an editor each. Two go on at a time, which keeps two cores busy where one would wait for the other's imports. */
const LANES = [["life"], ["review", "start", "trust"]];
const PARTS = [...ALONE, ...LANES.flat()];
const asked = process.argv.slice(2);
const unknown = asked.filter((part) => !PARTS.includes(part));
if (unknown.length > 0) throw new Error(`there is no part ${unknown.join(", ")}; there are ${PARTS.join(", ")}`);
rmSync(SHOTS, { recursive: true, force: true });
mkdirSync(SHOTS, { recursive: true });
let count = 0;
const failed = [];
const began = Date.now();

/** A scenario of a part; a failure ends the part, and leaves a picture of the window that it happened in. */
function scenarios(part) {
  return async (window, name, body) => {
    const start = Date.now();
    try {
      await body();
    } catch (error) {
      await window.page.screenshot({ path: join(SHOTS, `failure-${part}.png`) }).catch(() => undefined);
      console.log(`not ok - ${part}: ${name}\n${window.editor.log()}`);
      console.log(`messages: ${JSON.stringify(await window.messages().catch(String))}`);
      throw error;
    }
    console.log(`ok ${++count} - ${part}: ${name} (${((Date.now() - start) / 1000).toFixed(1)} s)`);
  };
}

async function parts(lane) {
  for (const part of lane.filter((one) => asked.length === 0 || asked.includes(one))) {
    const { run } = await import(`./${part}.mjs`);
    try {
      await run(scenarios(part));
    } catch (error) {
      console.log(`${part}: ${error.stack ?? error}`);
      failed.push(part);
    }
  }
}

await parts(ALONE);
await Promise.all(LANES.map(parts));
console.log(`${count} scenarios passed in ${((Date.now() - began) / 1000).toFixed(0)} s${failed.length > 0 ? `; failed: ${failed.join(", ")}` : ""}`);
process.exitCode = failed.length > 0 ? 1 : 0;
