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

function save({ place, spec }, format) {
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

for (const button of document.querySelectorAll("[data-save]")) {
  const figure = figures.find(({ place }) => place.id === button.dataset.save);
  button.addEventListener("click", () => save(figure, button.dataset.format));
}
