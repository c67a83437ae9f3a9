// Tests the extension in a real VS Code with the real server, on the CPU. Screenshots (light and dark theme) go to e2e/shots.
//
//   python3 scripts/dev.py e2e (installs the requirements), then: npm run package && npm run e2e [-- PART ... --repeat N]
//
// With --repeat, all parts run N times, without retries, and the last line says how many of these runs passed completely.
import { mkdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import { SHOTS } from "./editor.mjs";
import { readArguments, repeatRuns } from "./repeat.mjs";

/** Parts with time measurements run first and alone. */
const ALONE = ["load", "removal"];
/** Each part has its own editor. Two lanes run concurrently, to use two cores while imports block. */
const LANES = [["life", "lineage"], ["review", "start", "trust"]];
const PARTS = [...ALONE, ...LANES.flat()];
const { repeat, requested } = readArguments(process.argv.slice(2), PARTS);
rmSync(SHOTS, { recursive: true, force: true });
mkdirSync(SHOTS, { recursive: true });
/** In CI, a failed part is retried once, because browsers on shared machines are flaky. Retries are reported. */
const RETRIES = process.env.CI && repeat === 1 ? 1 : 0;
const done = new Set();
const failed = [];
const flaky = [];

/** A scenario failed and was already reported. */
class Failed extends Error {}

/** Runs a scenario of a part. A failure ends the part and saves a screenshot. */
function scenarios(part) {
  return async (window, name, body) => {
    const start = Date.now();
    try {
      await body();
    } catch (error) {
      await window.page.screenshot({ path: join(SHOTS, `failure-${part}.png`) }).catch(() => undefined);
      const messages = JSON.stringify(await window.messages().catch(String));
      console.log(`not ok - ${part}: ${name}\n${error.stack ?? error}\nmessages: ${messages}\nend of the log:\n${window.editor.log()}`);
      throw new Failed(`${part}: ${name}`);
    }
    done.add(`${part}: ${name}`);
    console.log(`ok ${done.size} - ${part}: ${name} (${((Date.now() - start) / 1000).toFixed(1)} s)`);
  };
}

/** Runs a part in its own editor, with retries in new editors. Returns whether one attempt passed. */
async function passed(part) {
  const { run } = await import(`./${part}.mjs`);
  for (let attempt = 1; ; attempt++) {
    try {
      await run(scenarios(part));
      if (attempt > 1) flaky.push(part);
      return true;
    } catch (error) {
      console.log(error instanceof Failed ? `failed - ${error.message}` : `failed - ${part}: ${error.stack ?? error}`);
      if (attempt > RETRIES) return false;
      console.log(`retrying ${part}`);
    }
  }
}

async function parts(lane) {
  for (const part of lane.filter((one) => requested.length === 0 || requested.includes(one))) {
    if (!(await passed(part))) failed.push(part);
  }
}

/** Runs all requested parts once and prints a summary. Returns whether they passed. */
async function completeRun() {
  const startTime = Date.now();
  done.clear();
  failed.length = flaky.length = 0;
  await parts(ALONE);
  await Promise.all(LANES.map(parts));
  const summary = [
    `${done.size} scenarios passed in ${((Date.now() - startTime) / 1000).toFixed(0)} s`,
    ...(flaky.length > 0 ? [`passed only after a retry: ${flaky.join(", ")}`] : []),
    ...(failed.length > 0 ? [`failed: ${failed.join(", ")}`] : []),
  ];
  console.log(summary.join("; "));
  return failed.length === 0;
}

process.exitCode = (await repeatRuns(repeat, completeRun, console.log)) ? 0 : 1;
