// Repeats the end-to-end tests, to count how many complete runs pass.
import { parseArgs } from "node:util";

/** The requested parts (none: all) and the number of runs. */
export function readArguments(words, parts) {
  const { values, positionals: requested } = parseArgs({ args: words, options: { repeat: { type: "string", default: "1" } }, allowPositionals: true });
  const repeat = Number(values.repeat);
  if (!Number.isInteger(repeat) || repeat < 1) throw new Error(`--repeat ${values.repeat}: give a number of runs, at least 1`);
  const unknown = requested.filter((part) => !parts.includes(part));
  if (unknown.length > 0) throw new Error(`unknown part ${unknown.join(", ")}; parts: ${parts.join(", ")}`);
  return { requested, repeat };
}

/** Calls `run` the given number of times; it returns whether a run passed. Returns whether all did. */
export async function repeatRuns(repeat, run, print) {
  let passed = 0;
  for (let number = 1; number <= repeat; number++) {
    if (repeat > 1) print(`# run ${number} of ${repeat}`);
    if (await run()) passed += 1;
  }
  if (repeat > 1) print(`${passed} of ${repeat} complete runs passed`);
  return passed === repeat;
}
