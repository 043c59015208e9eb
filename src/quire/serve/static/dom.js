// Elements of the page. Texts go in as text nodes: nothing that a client or a model is named can be markup.

export const find = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "onclick") made.addEventListener("click", value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((each) => each !== null && each !== undefined).map(asNode));
  return made;
}

const asNode = (each) => (each instanceof Node ? each : document.createTextNode(String(each)));

// -- numbers

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => (value === null || value === undefined ? "-" : plain.format(value));
export const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}\u00a0%` : "-");
// What the eviction policy takes a prefix for, and when it expects it back.
export const expected = ({ kind, chance, expected_s: within }) => (kind ? `${kind}: ${share(chance, 1)} come again, half of them within ${seconds(within)}` : "");
export const one = (value) => (value === null ? "-" : value < 10 && !Number.isInteger(value) ? value.toFixed(1) : plain.format(value));

export const clock = (at) => (at === undefined ? "-" : new Date(1000 * at).toLocaleTimeString("en-GB"));

export function seconds(value) {
  if (value === null || value === undefined) return "-";
  return value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)}\u00a0ms` : `${value.toFixed(value < 100 ? 2 : 0)}\u00a0s`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) (value /= 1024), (at += 1);
  return `${at && value < 100 ? value.toFixed(1) : Math.round(value)}\u00a0${units[at]}`;
}

// -- figures that change in place: the same element keeps its focus and its selection

export function figure(list, label, text, { metric, value, bad } = {}) {
  list.items ??= new Map();
  let shown = list.items.get(label);
  if (!shown) {
    shown = make("dd", { "data-metric": metric });
    list.append(make("div", {}, make("dt", {}, label), shown));
    list.items.set(label, shown);
  }
  if (shown.textContent !== text) shown.textContent = text;
  if (metric) shown.dataset.value = value;
  shown.classList.toggle("bad", Boolean(bad));
}

export function table(label, heads, rows) {
  const head = heads.some(Boolean) ? make("thead", {}, make("tr", {}, heads.map((each) => make(each ? "th" : "td", each ? { scope: "col" } : {}, each)))) : null;
  const body = rows.map((row) => make("tr", {}, row.map((cell, at) => (at ? make("td", {}, cell) : make("th", { scope: "row" }, cell)))));
  const made = make("table", {}, label ? make("caption", {}, label) : null, head, make("tbody", {}, body));
  return make("div", { class: "scrolls", role: "region", "aria-label": label || "Figures", tabindex: 0 }, made);
}

// Puts nodes in place only if `content` is another than at the last call: what is focused stays so.
export function put(place, content, nodes) {
  const key = JSON.stringify(content);
  if (place.key === key) return;
  place.key = key;
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.id : undefined;
  const top = [...place.querySelectorAll(".scrolls")].map((each) => [each.scrollLeft, each.scrollTop]);
  place.replaceChildren(...nodes());
  place.querySelectorAll(".scrolls").forEach((each, at) => top[at] && each.scrollTo(...top[at]));
  if (focused) place.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

// -- a bar of parts [{name, value, color, labels}], with its legend in words. One that `begins` another row of parts stands
// apart. Marks [{name, at, text}] are lines on it, at a part of its length.

export function barOf(label, parts, { unit = count, marks = [] } = {}) {
  const said = [...parts.filter((each) => each.value).map((each) => `${each.name} ${unit(each.value)}`), ...marks.map((each) => `${each.name} ${each.text}`)];
  const made = make("div", { class: "bar", role: "img", "aria-label": `${label}: ${said.join(", ") || "nothing"}` });
  for (const each of parts.filter((each) => each.value)) {
    const part = make("span", { class: `c-${each.color}${each.begins ? " begins" : ""}`, title: `${each.name}: ${unit(each.value)}` });
    part.style.flexGrow = each.value;
    made.append(part);
  }
  for (const each of marks) {
    const mark = make("i", { class: "mark", title: `${each.name}: ${each.text}` });
    mark.style.left = `${100 * each.at}%`;
    made.append(mark);
  }
  return made;
}

// With the `whole`, each part has its share of it.
export function legendOf(parts, { unit = count, metric, whole } = {}) {
  return make("ul", { class: "legend" }, parts.map((each) =>
    make("li", {}, make("span", { class: `dot c-${each.color}`, "aria-hidden": true }), `${each.name} `,
      make("b", { "data-metric": metric, "data-labels": each.labels, "data-value": metric ? each.value : null }, unit(each.value)),
      whole ? ` (${share(each.value, whole)})` : "")));
}

export function bar(label, parts, options = {}) {
  return [barOf(label, parts, options), legendOf(parts, { ...options, whole: parts.reduce((sum, each) => sum + each.value, 0) })];
}
