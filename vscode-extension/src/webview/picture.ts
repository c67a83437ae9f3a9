/** Charts as one picture: in the colours that they have on the screen, below each other. */

const SCALE = 2;
const GAP = 24;
const PAINTED = ["fill", "stroke", "font-family", "font-size", "font-weight", "opacity"];

/** A PNG of all charts, as base64. */
export async function picture(charts: readonly SVGSVGElement[]): Promise<string> {
  const images = await Promise.all(charts.map(image));
  const canvas = document.createElement("canvas");
  const width = Math.max(...images.map((one) => one.width)) + 2 * GAP;
  const height = images.reduce((sum, one) => sum + one.height + GAP, GAP);
  canvas.width = width * SCALE;
  canvas.height = height * SCALE;
  const context = canvas.getContext("2d");
  if (context === null) throw new Error("there is no canvas to draw on");
  context.scale(SCALE, SCALE);
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, width, height);
  let top = GAP;
  for (const one of images) {
    context.drawImage(one, GAP, top, one.width, one.height);
    top += one.height + GAP;
  }
  return canvas.toDataURL("image/png").replace(/^data:.*?,/, "");
}

/** A chart as an image of its own: the variables of the page's colours mean nothing there, so they are written out. */
async function image(chart: SVGSVGElement): Promise<HTMLImageElement> {
  const copy = chart.cloneNode(true) as SVGSVGElement;
  const originals = chart.querySelectorAll<SVGElement>("*");
  copy.querySelectorAll<SVGElement>("*").forEach((element, place) => {
    const original = originals[place];
    if (original === undefined) return;
    const style = getComputedStyle(original);
    for (const name of PAINTED) element.setAttribute(name, style.getPropertyValue(name));
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const made = new Image(chart.width.baseVal.value, chart.height.baseVal.value);
  made.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await made.decode();
  return made;
}
