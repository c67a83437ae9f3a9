/** Exports all charts as chartImage image, stacked vertically, in their colours on the screen. */

const SCALE = 2;
const GAP = 24;
const STYLE_PROPERTIES = ["fill", "stroke", "font-family", "font-size", "font-weight", "opacity"];

/** A PNG of all charts, as base64. */
export async function picture(charts: readonly SVGSVGElement[]): Promise<string> {
  const images = await Promise.all(charts.map(image));
  const canvas = document.createElement("canvas");
  const width = Math.max(...images.map((chartImage) => chartImage.width)) + 2 * GAP;
  const height = images.reduce((sum, chartImage) => sum + chartImage.height + GAP, GAP);
  canvas.width = width * SCALE;
  canvas.height = height * SCALE;
  const context = canvas.getContext("2d");
  if (context === null) throw new Error("the canvas has no 2D context");
  context.scale(SCALE, SCALE);
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, width, height);
  let top = GAP;
  for (const chartImage of images) {
    context.drawImage(chartImage, GAP, top, chartImage.width, chartImage.height);
    top += chartImage.height + GAP;
  }
  return canvas.toDataURL("image/png").replace(/^data:.*?,/, "");
}

/** A chart as a standalone image. CSS variables of the page are not available there, so computed styles are inlined. */
async function image(chart: SVGSVGElement): Promise<HTMLImageElement> {
  const copy = chart.cloneNode(true) as SVGSVGElement;
  const originals = chart.querySelectorAll<SVGElement>("*");
  copy.querySelectorAll<SVGElement>("*").forEach((element, index) => {
    const original = originals[index];
    if (original === undefined) return;
    const style = getComputedStyle(original);
    for (const name of STYLE_PROPERTIES) element.setAttribute(name, style.getPropertyValue(name));
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const result = new Image(chart.width.baseVal.value, chart.height.baseVal.value);
  result.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await result.decode();
  return result;
}
