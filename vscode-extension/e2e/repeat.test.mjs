import assert from "node:assert/strict";
import { test } from "node:test";
import { readArguments, repeatRuns } from "./repeat.mjs";

test("parts and the number of runs are read in any order", () => {
  assert.deepEqual(readArguments([], ["life", "load"]), { requested: [], repeat: 1 });
  assert.deepEqual(readArguments(["--repeat", "10", "load"], ["life", "load"]), { requested: ["load"], repeat: 10 });
});

test("an unknown part or number is refused with what is possible", () => {
  assert.throws(() => readArguments(["lod"], ["life", "load"]), /unknown part lod; parts: life, load/);
  for (const number of ["0", "2.5", "ten"]) assert.throws(() => readArguments(["--repeat", number], []), /at least 1/);
});

test("a failed run does not end the others, and the last line counts those that passed", async () => {
  const results = [true, false, true];
  const lines = [];
  assert.equal(await repeatRuns(3, async () => results.shift(), (line) => lines.push(line)), false);
  assert.deepEqual(lines, ["# run 1 of 3", "# run 2 of 3", "# run 3 of 3", "2 of 3 complete runs passed"]);
  assert.equal(await repeatRuns(2, async () => true, () => undefined), true);
});
