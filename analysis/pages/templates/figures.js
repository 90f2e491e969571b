/* Figures: drawn when they can be seen, one after the other, so that the page answers in between. */

const themes = read("themes");
const dark = matchMedia("(prefers-color-scheme: dark)");

const figures = [...document.querySelectorAll("[data-figure]")].map((script) => ({
  place: document.getElementById(script.dataset.figure),
  packed: script.textContent,
}));
const decode = async (text) => new TextDecoder().decode(await inflate(text));

const template = () => (dark.matches ? themes.dark : themes.light);

/* Colours that a figure names are the light theme's: in the dark each becomes its counterpart. */
const [bright, dim] = [themes.light, themes.dark].map(({ layout }) => layout.colorway);
const counterpart = new Map(bright.map((color, i) => [color.toLowerCase(), dim[i]]));

function themed(part) {
  if (!dark.matches) return structuredClone(part);
  const swap = (color) => counterpart.get(color.toLowerCase()) ?? color;
  return JSON.parse(JSON.stringify(part).replace(/#[0-9a-f]{6}(?=")/gi, swap));
}

/* The page shows a figure's title as text, and a saved figure brings its own. */
function draw({ place, spec }) {
  const layout = { ...themed(spec.layout), template: template(), autosize: true };
  const { margin } = layout.template.layout;
  layout.margin = { ...margin, ...layout.margin };
  layout.margin.t -= spec.head;
  for (const name of ["title", "width", "height"]) delete layout[name];
  return Plotly.react(place, themed(spec.data), layout, { displayModeBar: false, responsive: true });
}

/* Numbers as plotly's JSON has them: lists, or typed arrays in base64. */
const TYPES = {
  f4: Float32Array, f8: Float64Array, i1: Int8Array, u1: Uint8Array,
  i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array,
};

function numbers(part) {
  if (!part?.bdata) return part ?? [];
  const bytes = Uint8Array.from(atob(part.bdata), (c) => c.charCodeAt(0));
  const all = [...new TYPES[part.dtype](bytes.buffer)];
  if (!part.shape) return all;
  const wide = Number(part.shape.split(",").at(-1));
  return Array.from({ length: all.length / wide }, (_, i) => all.slice(i * wide, (i + 1) * wide));
}

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

/* What a figure draws, a line for each point or cell; names stand for places on an axis of names. */
function listValues({ data, layout }) {
  const lines = [["series", "panel", "x", "y", "value", "low", "high"]];
  for (const trace of data) {
    if (trace.hoverinfo === "skip") continue;
    const name = (axis, value) => {
      const { tickvals, ticktext } = layout[axis[0] + "axis" + axis.slice(1)] ?? {};
      const found = ticktext?.[numbers(tickvals).findIndex((at) => Math.abs(at - value) < 0.5)];
      return found && /[a-z]/i.test(found) ? found : value;
    };
    const [h, v] = [trace.xaxis ?? "x", trace.yaxis ?? "y"], panel = v.slice(1) || "1";
    const [x, y, z] = [trace.x, trace.y, trace.z].map(numbers);
    const own = numbers(trace.customdata), bars = trace.error_x ?? trace.error_y ?? {};
    const [up, down] = [bars.array, bars.arrayminus ?? bars.array].map(numbers);
    z.forEach((row, i) => row.forEach((value, j) => {
      if (missing(value)) return;
      const at = [[x, j, trace.x0, trace.dx], [y, i, trace.y0, trace.dy]].map(
        ([places, k, first = 0, step = 1]) => places[k] ?? first + k * step);
      lines.push([trace.name, panel, name(h, at[0]), name(v, at[1]), value]);
    }));
    if (!z.length) y.forEach((value, i) => {
      if (missing(value) || missing(x[i])) return;
      const middle = trace.error_x ? x[i] : value;
      const ends = up[i] > 0 || down[i] > 0 ? [middle - down[i], middle + up[i]] : [];
      const place = typeof own[i] === "number" ? own[i] : name(h, x[i]);
      lines.push([trace.name, panel, place, name(v, value), "", ...ends]);
    });
  }
  const cell = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  return lines.map((line) => line.map((value) => cell(String(value ?? ""))).join(",")).join("\n");
}

async function save(figure, format) {
  await unpack(figure);
  if (format !== "csv") return saveImage(figure, format);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([listValues(figure.spec)], { type: "text/csv" }));
  link.download = `${figure.place.id}.csv`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function saveImage({ place, spec }, format) {
  const { width, height } = spec.layout;
  const layout = { ...themed(spec.layout), template: template() };
  const options = { format, width, height, filename: place.id, scale: format === "png" ? 3 : 1 };
  return Plotly.downloadImage({ data: themed(spec.data), layout }, options);
}

/* A folded figure has no box. */
const isSeen = ({ place }) => place.getClientRects().length > 0;
const marks = document.documentElement.dataset;
let drawing = Promise.resolve();

/* How far a figure is from what the window shows. */
function distance({ place }) {
  const { top, bottom } = place.getBoundingClientRect();
  return Math.max(top - innerHeight, -bottom, 0);
}

async function drawSeen(again = false) {
  let waiting = figures.filter((figure) => isSeen(figure) && (again || !figure.drawn));
  while (waiting.length) {
    // The reader may have scrolled or folded a section.
    const [figure, ...others] = waiting.sort((one, two) => distance(one) - distance(two));
    waiting = others.filter(isSeen);
    await unpack(figure);
    await draw(figure);
    if (!figure.heard) listen(figure);
    figure.drawn = figure.heard = true;
    marks.first ??= Math.round(performance.now());
    await new Promise((go) => setTimeout(go));
  }
  if (again) for (const figure of figures) figure.drawn &&= isSeen(figure);
  marks.drawn = Math.round(performance.now());
}

function queueDrawing(again = false) {
  delete marks.drawn;
  drawing = drawing.then(() => drawSeen(again));
  return drawing;
}

async function loadPlotly() {
  const script = document.createElement("script");
  script.textContent = await decode(document.getElementById("plotly").textContent);
  document.head.append(script);
}

/* A matrix names what meets in a cell; the words come from layout.meta, once a figure. */

const tip = document.getElementById("tip");

function span(first, pool, length) {
  const last = Math.min(first + pool, length) - 1;
  return pool === 1 ? `${first}` : `${first}–${last}`;
}

function cellText(point, { tokens, roles, pool, digits = 3, value: name = "value" }) {
  const i = Math.round(point.y - (pool - 1) / 2), j = Math.round(point.x - (pool - 1) / 2);
  const value = point.z.toPrecision(digits);
  if (pool > 1) {
    const [rows, columns] = [span(i, pool, tokens.length), span(j, pool, tokens.length)];
    return `rows i = ${rows}, columns j = ${columns}\nlargest ${name} ${value}`;
  }
  return `i = ${i}: ${roles[i]}, token ${tokens[i]}\n` +
    `j = ${j}: ${roles[j]}, token ${tokens[j]}\ni − j = ${i - j}, ${name} ${value}`;
}

function showTip({ points, event }, meta) {
  const point = points.find((p) => p.z !== undefined);
  if (!point) return;
  tip.textContent = cellText(point, meta);
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

async function unpack(figure) {
  figure.spec ??= JSON.parse(await decode(figure.packed));
  const { data, layout } = figure.spec;
  figure.views ??= layout.meta?.views ?? [];
  if (layout.meta) delete layout.meta.views;
  if (!layout.meta?.tokens) return;
  for (const trace of data) {
    if (trace.type === "heatmap") Object.assign(trace, { hoverinfo: "none", hovertemplate: null });
  }
}

function listen({ place, spec }) {
  if (!spec.layout.meta?.tokens) return;
  place.on("plotly_hover", (event) => showTip(event, spec.layout.meta));
  place.on("plotly_unhover", () => { tip.hidden = true; });
}

/* Traces and axes of a view take the place of the figure's own, also in what is saved. */
async function choose(figure, i) {
  await unpack(figure);
  const { data, layout, ...meta } = figure.views[i];
  data.forEach((part, k) => Object.assign(figure.spec.data[k], part));
  Object.assign(figure.spec.layout, layout);
  Object.assign(figure.spec.layout.meta, meta);
  return queueDrawing().then(() => draw(figure));
}

for (const select of document.querySelectorAll("[data-view]")) {
  const figure = figures.find(({ place }) => place.id === select.dataset.view);
  select.addEventListener("change", () => choose(figure, select.selectedIndex));
}

for (const button of document.querySelectorAll("[data-save]")) {
  const figure = figures.find(({ place }) => place.id === button.dataset.save);
  button.addEventListener("click", () => save(figure, button.dataset.format));
}
