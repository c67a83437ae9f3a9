// Reads and writes PNG files, without interlacing, 8 bits a channel.
import { crc32, deflateSync, inflateSync } from "node:zlib";

const SIGNATURE = Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
const [RGB, PALETTE, RGBA] = [2, 3, 6];
const MAX_COLOURS = 256;

function chunk(name, data) {
  const body = Buffer.concat([Buffer.from(name, "latin1"), data]);
  const out = Buffer.alloc(8 + body.length);
  out.writeUInt32BE(data.length, 0);
  body.copy(out, 4);
  out.writeUInt32BE(crc32(body), 4 + body.length);
  return out;
}

function file(width, height, kind, ...chunks) {
  const header = Buffer.alloc(13);
  header.writeUInt32BE(width, 0);
  header.writeUInt32BE(height, 4);
  header.set([8, kind, 0, 0, 0], 8);
  return Buffer.concat([SIGNATURE, chunk("IHDR", header), ...chunks, chunk("IEND", Buffer.alloc(0))]);
}

/** Compresses rows, each without a filter: text on plain areas repeats exactly. */
function compressed(pixels, rowBytes) {
  const rows = [];
  for (let start = 0; start < pixels.length; start += rowBytes) rows.push(Buffer.from([0]), pixels.subarray(start, start + rowBytes));
  return chunk("IDAT", deflateSync(Buffer.concat(rows), { level: 9, memLevel: 9 }));
}

/** The file of an image with an opacity for each pixel. */
export function encodeRgba(width, height, pixels) {
  return file(width, height, RGBA, compressed(Buffer.from(pixels), 4 * width));
}

function paeth(left, up, corner) {
  const [toLeft, toUp, toCorner] = [left, up, corner].map((value) => Math.abs(left + up - corner - value));
  if (toLeft <= toUp && toLeft <= toCorner) return left;
  return toUp <= toCorner ? up : corner;
}

/** The width, the height and the RGB pixels of an opaque image. */
export function decode(data) {
  const parts = [];
  let [width, height, kind] = [0, 0, 0];
  for (let at = 8; at < data.length; at += 12 + data.readUInt32BE(at)) {
    const name = data.toString("latin1", at + 4, at + 8);
    const body = data.subarray(at + 8, at + 8 + data.readUInt32BE(at));
    if (name === "IHDR") [width, height, kind] = [body.readUInt32BE(0), body.readUInt32BE(4), body[9]];
    if (name === "IDAT") parts.push(body);
  }
  if (kind !== RGB && kind !== RGBA) throw new Error(`PNG files of kind ${kind} are not supported`);
  const size = kind === RGB ? 3 : 4;
  const raw = inflateSync(Buffer.concat(parts));
  const row = width * size;
  const bytes = Buffer.alloc(row * height);
  for (let y = 0; y < height; y++) {
    const filter = raw[y * (row + 1)];
    for (let x = 0; x < row; x++) {
      const at = y * row + x;
      const left = x < size ? 0 : bytes[at - size];
      const up = y === 0 ? 0 : bytes[at - row];
      const corner = x < size || y === 0 ? 0 : bytes[at - row - size];
      const predicted = [0, left, up, (left + up) >> 1, paeth(left, up, corner)][filter];
      bytes[at] = raw[y * (row + 1) + 1 + x] + predicted;
    }
  }
  if (size === 3) return { width, height, pixels: bytes };
  const pixels = Buffer.alloc(3 * width * height);
  for (let at = 0; at < width * height; at++) bytes.copy(pixels, 3 * at, 4 * at, 4 * at + 3);
  return { width, height, pixels };
}

function colourAt(pixels, at) {
  return (pixels[at] << 16) | (pixels[at + 1] << 8) | pixels[at + 2];
}

/** At most 256 colours, so that each of the given ones is near one of them: the error is the smallest for which that is possible. */
function paletteFor(colours) {
  for (let error = 0; ; error += 2) {
    const palette = [];
    for (const colour of colours) {
      if (distanceTo(palette, colour).distance > error ** 2) palette.push(channels(colour));
      if (palette.length > MAX_COLOURS) break;
    }
    if (palette.length <= MAX_COLOURS) return palette;
  }
}

function channels(colour) {
  return [colour >> 16, (colour >> 8) & 0xff, colour & 0xff];
}

/** The index of the nearest colour, and the square of its distance. */
function distanceTo(palette, colour) {
  const [red, green, blue] = channels(colour);
  let [index, distance] = [-1, Infinity];
  for (let at = 0; at < palette.length; at++) {
    const [r, g, b] = palette[at];
    const here = (r - red) ** 2 + (g - green) ** 2 + (b - blue) ** 2;
    if (here < distance) [index, distance] = [at, here];
  }
  return { index, distance };
}

/** An opaque image with at most 256 colours; frequent colours are unchanged. */
export function compress(data) {
  const { width, height, pixels } = decode(data);
  const counts = new Map();
  for (let at = 0; at < pixels.length; at += 3) {
    const colour = colourAt(pixels, at);
    counts.set(colour, (counts.get(colour) ?? 0) + 1);
  }
  const colours = [...counts].sort(([, a], [, b]) => b - a).map(([colour]) => colour);
  const palette = paletteFor(colours);
  const indices = new Map(colours.map((colour) => [colour, distanceTo(palette, colour).index]));
  const image = Buffer.alloc(width * height);
  for (let at = 0; at < image.length; at++) image[at] = indices.get(colourAt(pixels, 3 * at));
  return file(width, height, PALETTE, chunk("PLTE", Buffer.from(palette.flat())), compressed(image, width));
}
