// Memory: frames of each group and tier by state, where the plan's share of a group ends, and what holds cached pages.

import { bar, barOf, bytes, count, figure, find, legendOf, make, put, share } from "./dom.js";

const STATES = [["private", "host"], ["cached", "device"], ["moving", "moving"], ["quarantined", "bad"], ["free", "free"],
  ["released", "free striped"]];

export function showMemory(counters, { groups = {}, arena }) {
  const frames = counters.frames ?? {};
  const shared = arena && arena.upper in frames;
  const pools = shared ? [] : Object.keys(frames).map((group) => ["device", group, frames[group], groups[group]]);
  for (const [group, found] of Object.entries(counters.tiers?.host ?? {})) pools.push(["host", group, found]);
  put(find("pools"), [frames, pools], () => [...(shared ? [arenaOf(frames, groups, arena)] : []), ...pools.map((each) => pool(...each))]);
  const held = Object.entries(counters.held_pages ?? {}).filter(([, pages]) => pages);
  put(find("held"), held, () => (held.length ? heldBar(held) : []));
  const tenants = Object.entries(counters.tenants ?? {});
  put(find("tenants"), tenants, () => tenants.map((each) => tenant(...each, tenants)));
  const tiles = find("held-tiles");
  const of = (label, metric, value) => figure(tiles, label, count(value), { metric, value });
  of("tokens in a page", "quire_page_size", counters.page_size);
  of("pages that are retained", "quire_retained_pages", counters.retained_pages);
  of("pages that sessions hold", "quire_session_held_pages", counters.session_held_pages);
  of("pages with several readers", "quire_shared_pages", counters.shared_pages);
  of("pages that were evicted", "quire_evicted_pages_total", counters.evicted_pages);
  of("times that memory was short", "quire_shortages_total", counters.shortages);
}

const partsOf = (tier, group, frames) => STATES.filter(([state]) => (state === "released" ? frames[state] : state in frames)).map(([state, color]) => (
  { name: state, value: frames[state], color, labels: `group=${group};state=${state};tier=${tier}` }));

// Where the memory can be resized, a mark says what stays at its least size.
function pool(tier, group, frames, { planned_frames: planned, least_frames: least } = {}) {
  const name = `${tier}, group ${group}`;
  const said = [`${count(frames.total)} frames`];
  if (planned !== undefined) said[0] += planned === frames.total ? ", as planned" : ` of ${count(planned)} that are planned`;
  const marks = least < frames.total ? [{ name: "the least", at: least / frames.total, text: `${count(least)} frames` }] : [];
  said.push(...marks.map((each) => `${each.name} is ${each.text}`));
  if (frames.evictable !== undefined) said.push(`${count(frames.evictable)} of the cached can be evicted`);
  return make("div", { class: "pool" }, make("h3", {}, name, make("small", {}, ` ${said.join("; ")}`)),
    bar(name, partsOf(tier, group, frames), { metric: "quire_frames", marks }));
}

// Two groups in one range of bytes: each from its end, and between them what either can take.
function arenaOf(frames, groups, { bytes: whole, upper: last }) {
  const names = Object.keys(groups).toSorted((a, b) => (a === last) - (b === last));
  const ends = names.map((group) => {
    const size = groups[group].bytes_per_frame;
    const parts = partsOf("device", group, frames[group]);
    const used = parts.filter(({ name }) => name !== "free").map((each) => ({ ...each, name: `${group}, ${each.name}`, value: size * each.value }));
    const planned = groups[group].planned_frames;
    return { group, size, parts, used, planned, part: (size * planned) / whole };
  });
  const [low, high] = ends;
  const sum = (parts) => parts.reduce((total, each) => total + each.value, 0);
  const free = Math.max(0, whole - sum(low.used) - sum(high.used));
  const name = `device, groups ${low.group} and ${high.group} in one arena`;
  const marks = [{ ...low, at: low.part }, { ...high, at: 1 - high.part }].map(({ group, planned, at }) => (
    { name: `planned for ${group}`, at, text: `${count(planned)} frames` }));
  const upper = high.used.toReversed().map((each, at, all) => ({ ...each, begins: all.findIndex(({ value }) => value) === at }));
  const shown = [...low.used, { name: "free", value: free, color: "free" }, ...upper];
  return make("div", { class: "pool" },
    make("h3", {}, name, make("small", {}, ` ${bytes(whole)}, ${bytes(free)} of them free, ${share(free, whole)}`)),
    barOf(name, shown, { unit: bytes, marks }),
    ends.map((each, at) => make("div", { class: "end" },
      make("p", { class: "hint" }, `${each.group}, from the ${at ? "right" : "left"}: frames of ${bytes(each.size)}; `, make("span", { class: "key", "aria-hidden": true }),
        `${count(each.planned)} are planned; ${count(frames[each.group].evictable)} of the cached can be evicted; free are as many as fit now`),
      legendOf(each.parts, { metric: "quire_frames" }))));
}

function heldBar(held) {
  const colors = { "running request": "host", session: "evicted", retention: "storage", "launched step": "moving" };
  const parts = held.map(([name, value]) => ({ name, value, color: colors[name] ?? "peer", labels: `reason=${name}` }));
  return [make("h3", {}, "What holds cached pages", make("small", {}, " a page counts once for each holder")), ...bar("Held", parts, { metric: "quire_held_pages" })];
}

// What a tenant has of all KV memory, with its floor and its ceiling as marks.
function tenant(name, found, all) {
  const whole = Math.max(...all.map(([, each]) => Math.max(each.ceiling_bytes, each.held_bytes + each.cached_bytes)));
  const parts = [
    { name: "in use", value: found.held_bytes, color: "host" }, { name: "cached", value: found.cached_bytes, color: "device" },
    { name: "others and free", value: whole - found.held_bytes - found.cached_bytes, color: "free" },
  ];
  const marks = [["floor", found.floor_bytes], ["ceiling", found.ceiling_bytes]].filter(([, value]) => value && value < whole)
    .map(([kind, value]) => ({ name: kind, at: value / whole, text: bytes(value) }));
  const told = marks.map((each) => `${each.name} ${each.text}`);
  const of = (label, key, end = "") => make("li", {}, `${label} `,
    make("b", { "data-metric": `quire_tenant_${key}${end}`, "data-labels": `tenant=${name}`, "data-value": found[key] }, count(found[key])));
  return make("div", { class: "pool" },
    make("h3", {}, `tenant ${name}`, make("small", {}, ` ${[...told, `weight ${found.weight}`].join(", ")}`)), barOf(name, parts, { unit: bytes, marks }),
    legendOf(parts.slice(0, 2), { unit: bytes, whole }),
    make("ul", { class: "legend" }, of("waiting", "waiting_requests"), of("prompt tokens", "prompt_tokens", "_total"),
      of("of them cached", "hit_tokens", "_total"), of("pages lost to others", "lost_pages", "_total")));
}
