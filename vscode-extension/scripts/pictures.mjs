// Copies the README screenshots from the last end-to-end test.
import { copyFileSync, statSync } from "node:fs";

/** Maximum total size, to keep clones of the repository small. */
const MAX_BYTES = 400_000;
const PICTURES = ["review", "report"];

for (const name of PICTURES) copyFileSync(`e2e/shots/${name}-light.png`, `media/${name}.png`);
const bytes = PICTURES.reduce((sum, name) => sum + statSync(`media/${name}.png`).size, 0);
if (bytes > MAX_BYTES) throw new Error(`the pictures have ${bytes} bytes, more than ${MAX_BYTES}`);
console.log(`${PICTURES.length} pictures, ${bytes} bytes`);
