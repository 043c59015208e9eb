// What the engine answers when a button asks: its tree, and another plan.

import { bar, bytes, clock, count, expected, make, share, table } from "./dom.js";
import { DISTINCT, ledgerBars } from "./parts.js";

// Prefixes one inside the other, or those with most of what `order` names first.
export function treeTold({ branches, namespaces, num_nodes: nodes, whole, page_size: size }, order) {
  if (!branches.length) return [make("p", { class: "hint" }, "Nothing is cached.")];
  const name = (each) => (each.adapter ? `${each.name}, adapter ${each.adapter}` : each.name);
  const all = namespaces.reduce((sum, each) => sum + each.pages, 0);
  const most = namespaces.toSorted((a, b) => b.pages - a.pages);
  const tenants = {};
  for (const { tenant, pages } of namespaces) if (tenant) tenants[tenant] = (tenants[tenant] ?? 0) + pages;
  const owners = Object.entries(tenants).toSorted(([, a], [, b]) => b - a);
  const owner = owners.length ? ["tenant"] : [];
  const of = (each) => owner.map(() => each.tenant);
  const counts = (each) => [count(each.pages), count(each.device_pages), count(each.hits), count(each.leases)];
  return [
    make("p", {}, `${count(nodes)} edges${whole ? "" : " near the roots, of more"}, ${count(all)} pages of ${count(size)} tokens.`),
    ...(owners.length ? shares("Pages by tenant", owners) : []),
    ...shares("Pages by namespace", most.map((each) => [name(each), each.pages])),
    table("Namespaces", ["namespace", ...owner, "pages", "on the device", "hits", "in use by"], most.map((each) => [name(each), ...of(each), ...counts(each)])),
    table(order ? `Prefixes, those with most ${order} first` : "Prefixes, each inside the one above it", ["tokens of the prefix", "pages with all below", "share", "on the device", "hits", "in use by", "go on in", ...owner, "namespace", "expected back"],
      (order ? branches.toSorted((a, b) => b[order] - a[order]).map((each) => [each, 0]) : inOrder(branches)).map(([each, level]) => {
        const [pages, ...more] = counts(each);
        return [prefix(each, level, size), pages, share(each.pages, all), ...more, count(each.children), ...of(namespaces[each.namespace]), name(namespaces[each.namespace]), expected(each)];
      })),
  ];
}

// A bar of the first ones, which have most.
function shares(label, found) {
  const parts = found.slice(0, DISTINCT.length - 1).map(([name, value], at) => ({ name, value, color: DISTINCT[at] }));
  const others = found.slice(DISTINCT.length - 1).reduce((sum, [, pages]) => sum + pages, 0);
  if (others) parts.push({ name: "all others", value: others, color: DISTINCT.at(-1) });
  return [make("h3", {}, label), ...bar(label, parts)];
}

// Each branch after the one that it is in, the largest first, with its level.
function inOrder(branches) {
  const inside = new Map();
  branches.forEach((each, at) => inside.set(each.parent, [...(inside.get(each.parent) ?? []), [each, at]]));
  const below = (parent, level) => (inside.get(parent) ?? []).toSorted(([a], [b]) => b.pages - a.pages)
    .flatMap(([each, at]) => [[each, level], ...below(at, level + 1)]);
  return below(-1, 0);
}

function prefix({ depth, own_pages: own }, level, size) {
  const shown = make("span", { class: "branch" }, `${count(depth * size)} to ${count((depth + own) * size)}`);
  shown.style.setProperty("--level", Math.min(level, 8));
  return shown;
}

const MOST_SHORTAGES = 20;
const MOST_HOLDERS = 3;

export function shortTold({ shortages, highest }) {
  const used = highest.filter(({ state }) => state === "used").map(({ tier, group, frames, at }) => [`${tier}, group ${group}`, count(frames), clock(at)]);
  const rows = shortages.slice(-MOST_SHORTAGES).toReversed().map(({ at, why, holds, requests }) => [
    clock(at), why, holds, requests.slice(0, MOST_HOLDERS).map(({ request, pages }) => `${request}: ${count(pages)} pages`).join(", "),
  ]);
  return [
    table("The most frames at once that could not be evicted", ["where", "frames", "at"], used),
    rows.length ? table("When memory was short", ["at", "why", "what held it", "the requests with most pages"], rows)
      : make("p", { class: "hint" }, "Memory was never short."),
  ];
}

const PLANNED = [
  ["KV memory", "kv_bytes", bytes], ["tokens in a page", "page_size", count], ["context", "context", count], ["tokens that fit", "max_total_num_tokens", count],
  ["requests of the whole context", "requests_at_context", count], ["largest request", "largest_request", count],
  ["smallest prefix that is reused", "minimum_reusable_prefix", count], ["bytes of a token", "bytes_per_token", count],
];

export function planTold(now, then) {
  const rows = PLANNED.map(([name, key, told]) => [name, told(now[key]), told(then[key])]);
  return [
    make("p", { class: then.fits ? "good" : "bad" }, then.fits ? "It fits." : "No request of the whole context fits."),
    table("The plan now, and that one", ["", "now", "then"], rows), ...ledgerBars(then.ledger),
    ...then.notes.map((note) => make("p", { class: "hint" }, note)),
  ];
}
