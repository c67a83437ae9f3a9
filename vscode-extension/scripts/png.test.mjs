import assert from "node:assert/strict";
import { test } from "node:test";
import { inflateSync } from "node:zlib";
import { compress, decode, encodeRgba } from "./png.mjs";

const [WIDTH, HEIGHT] = [40, 30];

/** An opaque image: the colour of each point. */
function image(colourAt) {
  const pixels = [];
  for (let y = 0; y < HEIGHT; y++) for (let x = 0; x < WIDTH; x++) pixels.push(...colourAt(x, y), 255);
  return encodeRgba(WIDTH, HEIGHT, pixels);
}

/** The content of all chunks with a name. */
function chunks(data, name) {
  const contents = [];
  for (let at = 8; at < data.length; at += 12 + data.readUInt32BE(at)) {
    if (data.toString("latin1", at + 4, at + 8) === name) contents.push(data.subarray(at + 8, at + 8 + data.readUInt32BE(at)));
  }
  return Buffer.concat(contents);
}

/** The RGB pixels of an image with a palette and no filters. */
function palettePixels(data) {
  const palette = chunks(data, "PLTE");
  const raw = inflateSync(chunks(data, "IDAT"));
  const pixels = [];
  for (let y = 0; y < HEIGHT; y++) {
    assert.equal(raw[y * (WIDTH + 1)], 0);
    for (let x = 0; x < WIDTH; x++) {
      const index = raw[y * (WIDTH + 1) + 1 + x];
      pixels.push(...palette.subarray(3 * index, 3 * index + 3));
    }
  }
  return pixels;
}

test("what is written is read again", () => {
  const { width, height, pixels } = decode(image((x, y) => [x, y, x * y % 256]));
  assert.deepEqual([width, height], [WIDTH, HEIGHT]);
  assert.deepEqual([...pixels.subarray(3 * (WIDTH * 7 + 9), 3 * (WIDTH * 7 + 9) + 3)], [9, 7, 63]);
});

test("an image with few colours is compressed without loss", () => {
  const original = image((x, y) => [x % 8, y % 8, 200]);
  assert.deepEqual(palettePixels(compress(original)), [...decode(original).pixels]);
});

test("of an image with many colours, the most frequent ones are unchanged and all others near", () => {
  const original = image((x, y) => (y < 12 ? [163, 21, 21] : [6 * x, 8 * y, 3 * (x + y)]));
  const [before, after] = [decode(original).pixels, palettePixels(compress(original))];
  assert.deepEqual(after.slice(0, 3 * 12 * WIDTH), [...before.subarray(0, 3 * 12 * WIDTH)]);
  const errors = after.map((value, index) => Math.abs(value - before[index]));
  assert.ok(Math.max(...errors) > 0 && Math.max(...errors) <= 16, String(Math.max(...errors)));
});
