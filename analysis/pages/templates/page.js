"use strict";

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const themes = read("themes");
const dark = matchMedia("(prefers-color-scheme: dark)");

/* Headline numbers are shown from result.json and recomputed here from the metrics. */

function wilson(share, count) {
  const z = 1.959963984540054, square = (z * z) / count;
  const middle = share + square / 2;
  const half = z * Math.sqrt((share * (1 - share)) / count + square / (4 * count));
  return [
    Math.max(0, (middle - half) / (1 + square)),
    Math.min(1, (middle + half) / (1 + square)),
  ];
}

function recomputed() {
  const record = read("record"), numbers = { ...record };
  if (record.accuracy !== null) {
    const [low, high] = wilson(record.accuracy, record.scored);
    Object.assign(numbers, { accuracy: 100 * record.accuracy, low: 100 * low, high: 100 * high });
  }
  return numbers;
}

const UNITS = { accuracy: " %", low: " %", high: " %", loss: " nats", seconds: " s" };
const NAMES = { low: "the interval's low end", high: "the interval's high end" };

function checkHeadlines() {
  const numbers = recomputed(), wrong = [];
  for (const shown of document.querySelectorAll("[data-headline]")) {
    const name = shown.dataset.headline, text = shown.textContent.replaceAll(",", "");
    if (numbers[name] === null) continue;
    const decimals = (text.match(/\.(\d+)/)?.[1] ?? "").length;
    // Half of the last digit shown, and a little for rounding of the half itself.
    if (Math.abs(parseFloat(text) - numbers[name]) <= 0.501 * 10 ** -decimals) continue;
    shown.classList.add("disagrees");
    const said = numbers[name].toPrecision(4) + (UNITS[name] ?? "");
    wrong.push(`${NAMES[name] ?? name} is shown as ${shown.textContent}, the metrics say ${said}`);
  }
  const alarm = document.getElementById("alarm");
  alarm.textContent = `Numbers on this page disagree: ${wrong.join("; ")}.`;
  alarm.hidden = wrong.length === 0;
}

/* Figures: drawn one after the other, so that the page answers in between. */

const figures = [...document.querySelectorAll("[data-figure]")].map((script) => ({
  place: document.getElementById(script.dataset.figure),
  spec: JSON.parse(script.textContent),
}));

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

async function drawAll() {
  for (const figure of figures) {
    await draw(figure);
    await new Promise((go) => setTimeout(go));
  }
}

/* A matrix names what meets in a cell; the words come from layout.meta, once a figure. */

const tip = document.getElementById("tip");

function span(first, pool, length) {
  const last = Math.min(first + pool, length) - 1;
  return pool === 1 ? `${first}` : `${first}–${last}`;
}

function cellText(point, { tokens, roles, pool, value: name = "value" }) {
  const i = Math.round(point.y - (pool - 1) / 2), j = Math.round(point.x - (pool - 1) / 2);
  const value = point.z.toPrecision(3);
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

for (const { place, spec } of figures) {
  if (!spec.layout.meta?.tokens) continue;
  for (const trace of spec.data) {
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

/* Only a run's own page has numbers to hold to their record. */
if (document.getElementById("record")) checkHeadlines();
drawAll().then(() => {
  figures.forEach(listen);
  dark.addEventListener("change", drawAll);
  document.documentElement.dataset.drawn = Math.round(performance.now());
});
