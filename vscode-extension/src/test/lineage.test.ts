import assert from "node:assert/strict";
import { test } from "node:test";
import { evolutionRow, ordered, readEvolutions, versionActions, versionRow, type Evolution, type Version } from "../core/lineage";

function version(number: number, more: Partial<Version> = {}): Version {
  return { number, parent: number === 0 ? null : number - 1, status: "kept", title: `action ${number}`, reason: `reason ${number}`, speedup: 1 + number / 4, written: true, ...more };
}

function evolution(more: Partial<Evolution> = {}): Evolution {
  const versions = [version(0, { title: "your code" }), version(1), version(2), version(3, { written: false, speedup: 0, status: "failed" })];
  return { run: "ab12", uri: "file:///p/model.py", target: "f", started: 1_700_000_000, best: 2, estimated: true, versions, ...more };
}

test("invalid evolutions and versions are ignored", () => {
  assert.deepEqual(readEvolutions([evolution()]), [evolution()]);
  assert.deepEqual(readEvolutions(undefined), []);
  assert.deepEqual(readEvolutions([{ ...evolution(), run: 1 }, { ...evolution(), versions: [{ number: "1" }] }]), []);
});

test("rows name actions, speed, status and reason", () => {
  const { versions } = evolution();
  assert.deepEqual(versions.map((item) => versionRow(evolution(), item)), [
    { label: "0  your code", description: "1.00x your code, estimated", detail: "reason 0" },
    { label: "1  action 1", description: "1.25x your code, estimated · kept, from 0", detail: "reason 1" },
    { label: "2  action 2", description: "1.50x your code, estimated · best, kept, from 1", detail: "reason 2" },
    { label: "3  action 3", description: "failed, from 2", detail: "reason 3" },
  ]);
  assert.equal(versionRow(evolution({ estimated: false }), version(1)).description, "1.25x your code · kept, from 0");
  assert.match(evolutionRow(evolution()).description, /^3 versions, .*, run ab12$/);
});

test("versions with a text are listed, the best first and then the newest", () => {
  assert.deepEqual(ordered(evolution({ best: 1 })).map(({ number }) => number), [1, 2, 0]);
});

test("a version is opened, compared or verified, and the user's code is not verified", () => {
  const actions = (number: number, best: number): string[] =>
    versionActions(evolution({ best }), version(number)).map(({ action }) => (action.kind === "compare" ? `compare ${action.with}` : action.kind));
  assert.deepEqual(actions(2, 2), ["open", "compare 0", "compare 1", "compareWithAnother", "keep"]);
  assert.deepEqual(actions(1, 2), ["open", "compare 0", "compare 2", "compareWithAnother", "keep"]);
  assert.deepEqual(actions(3, 2), ["open", "compare 0", "compare 2", "compareWithAnother", "keep"]);
  assert.deepEqual(actions(4, 1), ["open", "compare 0", "compare 3", "compare 1", "compareWithAnother", "keep"]);
  assert.deepEqual(actions(0, 2), ["open", "compareWithAnother"]);
});
