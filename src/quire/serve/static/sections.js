// The sections of the page: what is in each event, in words, bars and charts.

import { Chart } from "./charts.js";
import { bar, bytes, count, figure, find, make, one, put, seconds, share, table } from "./dom.js";
import { showMemory } from "./memory.js";
import { showMoves } from "./moves.js";
import { CAUSES, causesBar, ledgerBars } from "./parts.js";
import { Prompts } from "./prompts.js";
import { planTold, shortTold, treeTold } from "./answers.js";

const QUANTILES = [{ name: "median", color: "device" }, { name: "95 %", color: "evicted" }];

export class Sections {
  constructor(ask) {
    this.ask = ask;
    this.prompts = new Prompts(ask);
    this.charts = {
      tokens: new Chart(find("chart-tokens"), [{ name: "in", color: "device" }, { name: "out", color: "host" }]),
      first: new Chart(find("chart-first"), QUANTILES, { unit: " ms" }),
      next: new Chart(find("chart-next"), QUANTILES, { unit: " ms" }),
      requests: new Chart(find("chart-requests"), [{ name: "running", color: "device" }, { name: "waiting", color: "evicted" }]),
      usage: new Chart(find("chart-usage"), [{ name: "in use", color: "host" }], { unit: " %", most: 100 }),
    };
    const look = () => this.answer("tree-told", "/v1/cache/tree", (tree) => treeTold(tree, find("tree-order").value));
    find("tree-ask").addEventListener("click", look);
    find("tree-order").addEventListener("change", look);
    find("plan-if").addEventListener("submit", (submitted) => {
      submitted.preventDefault();
      const asked = new URLSearchParams([...new FormData(submitted.target)].filter(([, value]) => value.trim()));
      this.answer("plan-if-told", `/v1/cache/plan?${asked}`, (plan) => planTold(this.facts.plan, plan));
    });
    find("audit-ask").addEventListener("click", () => this.answer("audit", "/v1/cache/audit", auditTold));
    find("short-ask").addEventListener("click", () => this.answer("short", "/v1/cache/history", shortTold));
    find("retained-ask").addEventListener("click", () => this.answer("retained", "/v1/cache/retained", retainedTold));
  }

  // What never changes, and the points of the last ten minutes.
  begin({ model, version, facts, points }) {
    find("model").textContent = `${model} · ${version}`;
    document.title = `${model} · Quire`;
    this.facts = facts;
    this.last = null;
    for (const chart of Object.values(this.charts)) chart.clear();
    points.forEach((point) => this.point(point));
    showPlan(facts);
  }

  // What draws each section.
  parts(now) {
    const { counters } = now;
    return {
      Now: () => {
        if (now.point && now.point.at !== this.last?.at) this.point(now.point);
        this.showNow(now);
      },
      Memory: () => showMemory(counters, this.facts),
      Hits: () => showHits(counters),
      Requests: () => this.prompts.show(now.requests, counters.page_size),
      Moves: () => showMoves(counters, this.facts.bytes_per_token),
      Checks: () => showChecks(now),
      Charts: () => Object.values(this.charts).forEach((chart) => chart.draw()),
    };
  }

  point(point) {
    const before = this.last;
    this.last = point;
    const rate = (now, then) => (before && now >= then ? (now - then) / (point.at - before.at) : null);
    const { charts } = this;
    this.rates = [rate(point.prompt_tokens, before?.prompt_tokens), rate(point.output_tokens, before?.output_tokens)];
    charts.tokens.add(point.at, this.rates);
    for (const name of ["first", "next"]) charts[name].add(point.at, point.latencies[name].map((each) => each && 1000 * each));
    charts.requests.add(point.at, [point.running_requests, point.waiting_requests]);
    charts.usage.add(point.at, [100 * point.usage]);
    if (!charts.causes && point.causes.length) {
      charts.causes = new Chart(find("chart-causes"), CAUSES.map(({ name, color }) => ({ name, color })));
    }
    charts.causes?.add(point.at, CAUSES.map((_, at) => rate(point.causes[at], before?.causes[at])));
  }

  showNow({ counters, restarts }) {
    const tiles = find("now-tiles");
    const of = (label, metric, value) => figure(tiles, label, count(value), { metric, value });
    of("running", "quire_running_requests", counters.running_requests);
    of("waiting", "quire_waiting_requests", counters.waiting_requests);
    figure(tiles, "tokens in, a second", one(this.rates?.[0] ?? null));
    figure(tiles, "tokens out, a second", one(this.rates?.[1] ?? null));
    for (const [label, name] of [["first token", "first"], ["between tokens", "next"], ["whole request", "whole"]]) {
      const [half, most] = this.last?.latencies[name] ?? [];
      figure(tiles, `${label}, median`, seconds(half));
      figure(tiles, `${label}, 95 %`, seconds(most));
    }
    of("prompt tokens", "quire_prompt_tokens_total", counters.prompt_tokens);
    of("output tokens", "quire_output_tokens_total", counters.output_tokens);
    of("requests that were preempted", "quire_preemptions_total", counters.preemptions);
    figure(tiles, "engines that were started again", count(restarts), {
      metric: "quire_engine_restarts_total", value: restarts, bad: restarts,
    });
    find("waiting-reason").textContent = counters.waiting_reason ? `The first that waits: ${counters.waiting_reason}` : "";
  }

  async answer(place, path, told) {
    try {
      const found = await this.ask(path);
      find(place).replaceChildren(...told(found));
    } catch (error) {
      find(place).replaceChildren(make("p", { class: "bad" }, error.message));
    }
  }
}

function showHits(counters) {
  const { tiers, prompt_tokens: whole = 0, hit_tokens: hits = 0, explained_tokens: causes = {} } = counters;
  const from = tiers
    ? [["device", tiers.device_hit_tokens], ["host", tiers.host_hit_tokens], ["storage", tiers.storage_hit_tokens], ["peer", tiers.peer_hit_tokens]]
    : [["cache", hits]];
  const parts = from.map(([name, value]) => ({ name, value, color: name === "cache" ? "device" : name }));
  parts.push({ name: "computed", value: whole - hits, color: "new" });
  put(find("sources"), parts, () => [make("h3", {}, `From where: ${share(hits, whole)} were cached`), ...bar("From where", parts)]);
  const why = CAUSES.filter(({ name }) => causes[name]);
  put(find("causes"), causes, () => (Object.keys(causes).length === 0
    ? [make("p", { class: "hint" }, "This engine was started without explanations.")]
    : [make("h3", {}, "Why"),
       ...causesBar(causes),
       table("Causes", ["cause", "tokens", "share", "what it is"],
         why.map(({ name, about }) => [name, count(causes[name]), share(causes[name], whole), about]))]));
}

function showChecks({ counters }) {
  const { canary, violation = "" } = counters;
  const tiles = find("check-tiles");
  const of = (label, metric, value, bad) => figure(tiles, label, count(value), { metric, value, bad });
  figure(tiles, "invariants", violation || "hold", { bad: violation });
  of("audits", "quire_audits_total", counters.audits);
  of("audits of the whole cache", "quire_whole_audits_total", counters.whole_audits);
  if (!canary) return;
  of("frames with a stamp", "quire_canary_stamped_pages_total", canary.stamped_pages);
  of("frames looked at on a hit", "quire_canary_hit_pages_total", canary.hit_pages);
  of("frames looked at in a sweep", "quire_canary_swept_pages_total", canary.swept_pages);
  of("damaged frames found", "quire_canary_found_pages_total", canary.found_pages, canary.found_pages);
}

function auditTold({ faults, violation, whole, ended, pages, nodes, findings }) {
  const wrong = [...faults, ...(violation ? [violation] : [])];
  const scope = !ended ? "not to its end: the engine is busy" : whole ? "the whole cache, unchanged meanwhile" : "beside running requests";
  return [
    make("p", { class: wrong.length ? "bad" : "good" }, wrong.length ? wrong.join("; ") : `All is well: ${count(pages)} pages and ${count(nodes)} edges, ${scope}.`),
    ...findings.map((each) => make("p", { class: "bad" }, `Page ${each.page} of group ${each.group}: ${each.kind}, seen in step ${each.step}.`)),
  ];
}

function retainedTold({ budget_tokens: budget, retained_tokens: kept, retentions }) {
  const said = make("p", {}, `${count(kept)} tokens are retained, of at most ${count(budget)}.`);
  if (!retentions.length) return [said];
  const names = Object.keys(retentions[0]).filter((name) => typeof retentions[0][name] !== "object");
  return [said, table("Retentions, the first to be released first", names.map((name) => name.replaceAll("_", " ")),
    retentions.map((each) => names.map((name) => (typeof each[name] === "number" ? count(each[name]) : String(each[name])))))];
}

function showPlan({ plan, context, largest_request: largest, bytes_per_token: token, weight_bytes: weights, device, dtype, architecture }) {
  const place = find("plan-body");
  if (!plan) return void place.replaceChildren(make("p", { class: "hint" }, "This engine tells of no plan."));
  const tiles = make("dl", { class: "tiles" });
  for (const [label, text] of [
    ["architecture", architecture], ["weights", `${bytes(weights)}, ${dtype}, on ${device}`], ["context", count(context)],
    ["largest request", `${count(largest)} tokens`], ["bytes of a token", count(token)], ["tokens that fit", count(plan.max_total_num_tokens)],
  ]) figure(tiles, label, text);
  const rows = plan.ledger.map((each) => [each.name, each.where, bytes(each.bytes), each.why + (each.estimated ? " (estimated)" : "")]);
  place.replaceChildren(tiles, ...ledgerBars(plan.ledger), table("The ledger", ["what", "where", "bytes", "why"], rows), ...plan.notes.map((note) => make("p", { class: "hint" }, note)));
}
