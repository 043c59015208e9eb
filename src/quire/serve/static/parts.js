// Parts that the page and reports share: a prompt as a strip, tokens by cause, and the bytes of a ledger.

import { bar, bytes, count, legendOf, make } from "./dom.js";

// In the order of `quire.observe.explain.Cause`. What is striped was cached, at least in part, and was computed again.
export const CAUSES = [
  { name: "hit", color: "device", about: "reused" },
  { name: "last_token", color: "device striped", about: "cached, and computed again: the last token, with its page" },
  { name: "logprobs", color: "storage striped", about: "cached, and computed again for log-probabilities of the prompt" },
  { name: "room", color: "evicted striped", about: "cached, and computed again since it left its request no room" },
  { name: "slower", color: "host striped", about: "cached below the device, and faster to compute than to load" },
  { name: "group", color: "moving striped", about: "cached, but a group of layers could not go on from there" },
  { name: "peer", color: "peer striped", about: "asked of a prefill engine, and computed here" },
  { name: "evicted", color: "evicted", about: "was cached and had to make room" },
  { name: "namespace", color: "namespace", about: "cached for another adapter or salt only" },
  { name: "page", color: "new striped", about: "less than a page in common" },
  { name: "new", color: "new", about: "never seen behind this prefix" },
];
const COLORS = Object.fromEntries(CAUSES.map(({ name, color }) => [name, color]));
export const DISTINCT = ["device", "host", "storage", "peer", "evicted", "namespace", "new"];
const MOST_TICKS = 80;

// Where tokens were, or why they were computed.
const named = ({ cause, tier }) => (tier ? `${tier} ${cause}` : cause);
const color = ({ cause, tier }) => tier ?? COLORS[cause] ?? "new";

export const dot = (reason) => make("span", { class: `dot c-${color(reason)}`, "aria-hidden": true });

// The tokens of a prompt from the first to the last, with a line at each page if these are few; and what colours mean.
export function strip(reasons, whole, pageSize) {
  const said = reasons.map((each) => `${count(each.tokens)} ${named(each)}`).join(", ");
  const shown = make("div", { class: "bar strip", role: "img", "aria-label": `The prompt, from its first token on: ${said}` });
  const sums = {};
  for (const each of reasons) {
    const { start, tokens, detail } = each;
    const part = make("span", { class: `c-${color(each)}`, title: `${start} to ${start + tokens - 1}: ${named(each)}${detail ? `, ${detail}` : ""}` });
    part.style.flexGrow = tokens;
    shown.append(part);
    (sums[named(each)] ??= { name: named(each), value: 0, color: color(each) }).value += tokens;
  }
  const ticks = whole / pageSize;
  if (ticks > 1 && ticks <= MOST_TICKS) shown.style.setProperty("--page", `${100 / ticks}%`);
  return [shown, legendOf(Object.values(sums), { whole })];
}

export function causesBar(causes) {
  const parts = CAUSES.filter(({ name }) => causes[name]).map(({ name, color }) => ({ name, value: causes[name], color, labels: `cause=${name}` }));
  return bar("Why", parts, { metric: "quire_prompt_tokens_by_cause_total" });
}

export function ledgerBars(lines) {
  return [...new Set(lines.map((each) => each.where))].flatMap((where) => [
    make("h3", {}, `On the ${where}`),
    ...bar(where, lines.filter((each) => each.where === where).map(({ name, bytes: value }, at) => ({ name, value, color: DISTINCT[at % DISTINCT.length] })), { unit: bytes }),
  ]);
}
