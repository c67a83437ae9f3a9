// Taking steps out: how long a discard and an undo take, from the click to the new state above the function.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { cpus, loadavg } from "node:os";
import { Editor, LONG, PYTHON, until } from "./editor.mjs";
import { isBusy } from "./load.mjs";
import { LADDER } from "./samples.mjs";

/** Maximum of the 95th percentile, in milliseconds. */
const MAX_MS = 1000;
const STEPS = 5;
const ROUNDS = 2;

/** Times sorted, with the median and the 95th percentile (nearest rank). */
function distribution(times) {
  const sorted = times.map(Math.round).sort((a, b) => a - b);
  const rank = (share) => sorted[Math.ceil(share * sorted.length) - 1];
  return { sorted, median: rank(0.5), p95: rank(0.95) };
}

export async function run(scenario) {
  const machine = { "mtmc.serverPython": PYTHON, "mtmc.python": PYTHON, "mtmc.archs": ["sm_90"] };
  const editor = await Editor.start({ machine, flags: ["--disable-workspace-trust"] });
  try {
    const files = Array.from({ length: ROUNDS }, (_, index) => `ladder${index}.py`);
    const workspace = editor.folder("work", { "pyproject.toml": "", ...Object.fromEntries(files.map((name) => [name, LADDER])) });
    const w = await editor.open(workspace, join(workspace, files[0]));
    const times = { discard: [], undo: [] };
    for (const name of files) {
      await scenario(w, `${name}: pending steps are discarded and kept steps undone, one after the other`, async () => {
        await w.ready();
        await w.file(join(workspace, name));
        await w.lightbulb("torch.tanh", "Optimize to Triton kernel");
        await w.thread(`1/${STEPS} `).waitFor({ timeout: LONG });
        await w.status.filter({ hasText: "CPU: verified, not timed" }).waitFor({ timeout: LONG });
        // Also while the steps before are verified again: that is when the machine is busy.
        for (const left of [4, 3]) times.discard.push(await w.timedClick(w.button(`1/${left + 1} `, "Discard"), new RegExp(`1/${left} `)));
        await until("they are verified", async () => /· verified/.test(await w.thread("1/3 ").innerText()), LONG);
        await w.line("torch.tanh").click();
        await w.command("MTMC: Keep all");
        await w.thread("3 steps kept").waitFor();
        times.undo.push(await w.timedClick(w.button("3 steps kept", "Undo$"), /2 steps kept/));
        times.undo.push(await w.timedClick(w.button("2 steps kept", "Undo$"), /1 step kept/));
        times.undo.push(await w.timedClick(w.button("1 step kept", "Undo$"), /Optimize to Triton kernel/));
        await until("the file is as it was", async () => readFileSync(join(workspace, name), "utf8") === LADDER);
      });
    }
    await scenario(w, "95 of 100 take less than a second", async () => {
      const all = distribution([...times.discard, ...times.undo]);
      for (const [kind, values] of Object.entries(times)) console.log(`   ${kind}: ${distribution(values).sorted.join(", ")} ms`);
      console.log(`   both: median ${all.median} ms, 95th percentile ${all.p95} ms, load ${loadavg()[0].toFixed(1)} on ${cpus().length} cores`);
      if (!isBusy()) assert.ok(all.p95 < MAX_MS, `${all.p95} ms`);
    });
    await w.close();
  } finally {
    await editor.stop();
  }
}
