// Draws media/icon.png (256 x 256): a grid of tiles, some of them highlighted, for operations that became one kernel.
import { writeFileSync } from "node:fs";
import { encodeRgba } from "./png.mjs";

const SIZE = 256;
const NIGHT = [24, 28, 44];
const TILE = [74, 92, 140];
const LIT = [255, 176, 46];

/** Whether a point is in a square with rounded corners. */
function isIn(x, y, left, top, side, radius) {
  const dx = Math.max(left + radius - x, x - (left + side - radius), 0);
  const dy = Math.max(top + radius - y, y - (top + side - radius), 0);
  return dx * dx + dy * dy <= radius * radius;
}

function colour(x, y) {
  if (!isIn(x, y, 0, 0, SIZE, 52)) return [0, 0, 0, 0];
  for (let row = 0; row < 3; row++) {
    for (let column = 0; column < 3; column++) {
      if (isIn(x, y, 44 + column * 60, 44 + row * 60, 48, 10)) {
        const lit = row + column >= 2 && (row === column || row + column > 2);
        return [...(lit ? LIT : TILE), 255];
      }
    }
  }
  return [...NIGHT, 255];
}

/** Antialiasing: the mean colour of 4 x 4 points in a pixel, weighted by opacity. */
function pixel(x, y) {
  const sum = [0, 0, 0, 0];
  for (let i = 0; i < 16; i++) {
    const [r, g, b, a] = colour(x + ((i % 4) + 0.5) / 4, y + (Math.floor(i / 4) + 0.5) / 4);
    [r * a, g * a, b * a, a].forEach((value, n) => (sum[n] += value));
  }
  const a = sum[3];
  return a === 0 ? [0, 0, 0, 0] : [sum[0] / a, sum[1] / a, sum[2] / a, a / 16].map(Math.round);
}

const pixels = [];
for (let y = 0; y < SIZE; y++) {
  for (let x = 0; x < SIZE; x++) pixels.push(...pixel(x, y));
}
writeFileSync("media/icon.png", encodeRgba(SIZE, SIZE, pixels));
