// Moves: lanes between tiers beside what steps compute, the health of the store, and the peers with what went between them.

import { bytes, count, find, legendOf, make, put, seconds, table } from "./dom.js";

const RECORDS = ["hits", "misses", "stored", "evicted", "lost", "overtaken", "reclaimed"];

export function showMoves({ tiers, transfer }, token) {
  put(find("moves-body"), [tiers, transfer], () => (tiers || transfer
    ? [...(tiers ? [...lanes(tiers, token), ...store(tiers)] : []), ...(transfer ? peers(transfer) : [])]
    : [make("p", { class: "hint" }, "This engine has no tier below the device, and no peers.")]));
}

const bad = (text) => make("p", { class: "bad" }, text);
const counts = (found) => Object.entries(found).map(([kind, times]) => [kind, count(times)]);

function lanes({ links, bandwidth, off, stuck, compute_rate: computed }, token) {
  const rows = Object.entries(links).filter(([, link]) => link.moves).map(([name, { moves, bytes: moved, seconds: took }]) => [
    name, count(moves), bytes(moved), seconds(took.count ? took.sum / took.count : null),
    bandwidth[name] ? `${bytes(bandwidth[name])}/s` : "-", count(bandwidth[name] && token ? bandwidth[name] / token : null),
    name in off ? `off: ${off[name]}` : name in stuck ? "nothing ends" : "works",
  ]);
  return [
    rows.length ? table("Lanes between tiers", ["lane", "moves", "bytes", "mean time", "bandwidth", "tokens a second", "state"], rows)
      : make("p", { class: "hint" }, "Nothing has moved yet."),
    computed ? make("p", { class: "hint" }, `Steps compute ${count(computed)} prompt tokens a second. A lane that is slower turns off.`) : "",
  ];
}

function store({ resolved, store: found, store_lost: lost, store_refused: refused }) {
  if (!resolved.storage) return [];
  const records = RECORDS.filter((name) => found[name] !== null).map((name) => ({ name, value: found[name], color: "storage" }));
  const failures = counts(found.failures);
  const unanswered = counts(refused);
  return [
    make("h3", {}, "Store", make("small", {}, ` ${resolved.storage.where}`)),
    lost.length ? bad(`It answers no ${lost.join(", ")}.`) : make("p", { class: "good" }, "It answers."),
    records.length ? legendOf(records) : "",
    failures.length ? table("Failures of the store", ["kind", "times"], failures) : "",
    unanswered.length ? table("Records of which it could say nothing", ["lane", "records"], unanswered) : "",
  ];
}

function peers({ role, connector, address, prefill_peers: asked, decode_peers: served, received, sent, ...found }) {
  const row = ({ name, address: at, state = "connected" }, does, its, failed) => [
    name, at, does, state, count(its?.asks), count(its?.tokens), bytes(its?.bytes), count(its && Object.values(its[failed]).reduce((a, b) => a + b, 0)),
  ];
  const rows = [
    ...asked.map((each) => row(each, "computes prompts for this one", received[each.name], "fallbacks")),
    ...served.map((each) => row(each, "asks this one", sent[each.name], "failures")),
  ];
  const refused = counts(found.refused_connections);
  return [
    make("h3", {}, "Peers", make("small", {}, ` role ${role}, by ${connector}${address ? `, at ${address}` : ""}`)),
    rows.length ? table("Engines that are connected", ["name", "address", "what it does", "state", "asks", "tokens", "bytes", "failed"], rows)
      : make("p", { class: "hint" }, "None is connected."),
    ...[...Object.entries(found.problems), ...Object.entries(found.failed_threads)].map(([where, why]) => bad(`${where}: ${why}`)),
    refused.length ? table("Connections that were refused", ["reason", "times"], refused) : "",
  ];
}
