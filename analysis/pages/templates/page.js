"use strict";

const read = (id) => JSON.parse(document.getElementById(id).textContent);

/* Text that was deflated and written as base64. */
async function inflate(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  // Not a Blob's stream: that asks the browser's own process, which may be busy.
  const source = new ReadableStream({
    start(whole) { whole.enqueue(bytes); whole.close(); },
  });
  return new Response(source.pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

/* Headline numbers are shown from result.json and recomputed here from the metrics. */

function recomputed() {
  const record = read("record"), numbers = { ...record };
  if (record.accuracy !== null) {
    const [low, high] = record.interval;
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

/* Contents: a column that is always open, or a bar to open; the section in view is marked. */

const contents = document.querySelector(".contents details");

function listContents() {
  const narrow = matchMedia("(max-width: 900px)");
  const fit = () => { contents.open = !narrow.matches; };
  narrow.addEventListener("change", fit);
  fit();
  const links = new Map();
  for (const link of contents.querySelectorAll("a")) {
    links.set(document.getElementById(link.hash.slice(1)), link);
    link.addEventListener("click", () => { if (narrow.matches) contents.open = false; });
  }
  const mark = () => {
    const above = [...links.keys()].filter((part) => part.getBoundingClientRect().top < 140);
    for (const [part, link] of links) {
      if (part === above.at(-1)) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };
  addEventListener("scroll", mark, { passive: true });
  mark();
}

/* A link to a section unfolds it, and what it is folded in. */
function unfoldTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let part = target.querySelector("details.fold") ?? target; part; part = part.parentElement) {
    if (part.matches("details.fold")) part.open = true;
  }
  target.scrollIntoView();
}

function unfoldAll() {
  for (const fold of document.querySelectorAll("details.fold")) fold.open = true;
  queueDrawing();
}
