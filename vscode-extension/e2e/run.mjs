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
/** In CI a part that failed is run once more, as a browser on a shared machine may miss a moment; that it was is told. */
const RETRIES = process.env.CI ? 1 : 0;
const done = new Set();
const failed = [];
const flaky = [];
const began = Date.now();

/** A scenario failed, and all there is to say of it was said. */
class Failed extends Error {}

/** A scenario of a part; a failure ends the part, and leaves a picture of the window that it happened in. */
function scenarios(part) {
  return async (window, name, body) => {
    const start = Date.now();
    try {
      await body();
    } catch (error) {
      await window.page.screenshot({ path: join(SHOTS, `failure-${part}.png`) }).catch(() => undefined);
      const messages = JSON.stringify(await window.messages().catch(String));
      console.log(`not ok - ${part}: ${name}\n${error.stack ?? error}\nmessages: ${messages}\nthe end of the log:\n${window.editor.log()}`);
      throw new Failed(`${part}: ${name}`);
    }
    done.add(`${part}: ${name}`);
    console.log(`ok ${done.size} - ${part}: ${name} (${((Date.now() - start) / 1000).toFixed(1)} s)`);
  };
}

/** A part in an editor of its own, and in another where it failed and may be tried again; whether one of them passed. */
async function passed(part) {
  const { run } = await import(`./${part}.mjs`);
  for (let tries = 1; ; tries++) {
    try {
      await run(scenarios(part));
      if (tries > 1) flaky.push(part);
      return true;
    } catch (error) {
      console.log(error instanceof Failed ? `failed - ${error.message}` : `failed - ${part}: ${error.stack ?? error}`);
      if (tries > RETRIES) return false;
      console.log(`${part} is run again`);
    }
  }
}

async function parts(lane) {
  for (const part of lane.filter((one) => asked.length === 0 || asked.includes(one))) {
    if (!(await passed(part))) failed.push(part);
  }
}

await parts(ALONE);
await Promise.all(LANES.map(parts));
const told = [
  `${done.size} scenarios passed in ${((Date.now() - began) / 1000).toFixed(0)} s`,
  ...(flaky.length > 0 ? [`passed only when run again: ${flaky.join(", ")}`] : []),
  ...(failed.length > 0 ? [`failed: ${failed.join(", ")}`] : []),
];
console.log(told.join("; "));
process.exitCode = failed.length > 0 ? 1 : 0;
