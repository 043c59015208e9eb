// A report as a page: its parts, from the JSON that is in the file.

import { Chart } from "./charts.js";
import { bar, bytes, count, find, make, one, table } from "./dom.js";
import { causesBar, ledgerBars, strip } from "./parts.js";

// Points of change: a value stays until the next one.
const SECONDS = { name: "after", stepped: true, said: (at) => (at === undefined ? "-" : `${one(at)} s`), scale: { time: false } };

// Few places, each with a dot and a tick.
const few = (name, places) => ({ name, dots: true, said: count, scale: { time: false, distr: 3, log: 2 }, axis: { splits: () => places, filter: (_, at) => at } });

const DRAWN = {
  text: ({ text, style }) => [make("p", { class: style }, text)],
  heading: ({ text }) => [make("h2", {}, text)],
  table: ({ label, heads, rows }) => [table(label, heads, rows)],
  bar: ({ label, parts, unit }) => [make("h3", {}, label), ...bar(label, parts, { unit: unit === "bytes" ? bytes : count })],
  causes: ({ causes }) => causesBar(causes),
  ledger: ({ label, lines }) => [label ? make("h2", {}, label) : null, ...ledgerBars(lines)],
  strip: ({ reasons, prompt_tokens: whole, page_size: size }) => strip(reasons, whole, size),
  chart({ label, x, across, series, unit, most }) {
    const place = make("div");
    const chart = new Chart(place, series, { unit, most, about: `${label}; at the end`, x: across === "seconds" ? SECONDS : few(across, x) });
    chart.data = [x, ...series.map((each) => each.values)];
    return [make("figure", {}, make("figcaption", {}, label), place)];
  },
};

const { parts } = JSON.parse(find("report").textContent);
let grid = null; // of charts that follow each other
for (const part of parts) {
  const made = DRAWN[part.kind](part).filter(Boolean);
  if (part.kind !== "chart") grid = null;
  else if (!grid) find("parts").append((grid = make("div", { class: "charts" })));
  (grid ?? find("parts")).append(...made);
}
