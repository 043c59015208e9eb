// The page: takes the events of /v1/cache/live, and has the sections show them. The key is in this variable alone.

import { find, make } from "./dom.js";
import { Sections } from "./sections.js";

const LONGEST_PAUSE_MS = 5000;

let key = "";
let stream = null;
let server = null; // behind a router: whose figures are shown,
let chosen = ""; // and whose are asked for, "" for any
const sections = new Sections(ask);

function headers() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function state(text, bad = false) {
  const shown = find("state");
  if (shown.textContent !== text) shown.textContent = text;
  shown.classList.toggle("bad", bad);
}

function wantKey(why) {
  find("key-why").textContent = why;
  find("key").hidden = false;
  find("sections").hidden = true;
  state("A key is needed.", true);
  find("key-text").focus();
}

async function ask(path) {
  const answer = await fetch(path, { headers: headers() });
  const found = await answer.json().catch(() => ({}));
  const own = found.processes?.find((each) => each.name === server); // a router has asked all
  const { answer: told, status } = own ?? { answer: found, status: answer.status };
  if (status !== 200) throw new Error(told.error?.message ?? `the server answered ${status}`);
  return told;
}

// Which of a router's servers answers, and the others, each with its address.
async function showServer(name) {
  server = name && decodeURIComponent(name);
  find("server").hidden = !server;
  if (!server) return;
  const { processes = [] } = await (await fetch("/health", { headers: headers() })).json();
  find("server-name").replaceChildren(...processes.map((each) =>
    make("option", { value: each.name, selected: each.name === server }, `${each.name} · ${each.url}`)));
}

function take(name, found) {
  if (name === "begin") sections.begin(found);
  else {
    sections.show(found);
    const { status, reason, stuck } = found.health;
    const why = reason ?? stuck?.join("; ");
    state(status === "ok" ? "The engine works." : `${status}: ${why}`, status !== "ok");
  }
}

async function read(body) {
  let pending = "";
  for await (const chunk of pieces(body.pipeThrough(new TextDecoderStream()).getReader())) {
    pending += chunk;
    for (let end; (end = pending.indexOf("\n\n")) >= 0; pending = pending.slice(end + 2)) {
      const lines = pending.slice(0, end).split("\n");
      const data = lines.find((line) => line.startsWith("data: "));
      const name = lines.find((line) => line.startsWith("event: "))?.slice(7) ?? "";
      if (data) take(name, JSON.parse(data.slice(6)));
    }
  }
}

async function* pieces(reader) {
  for (let piece; !(piece = await reader.read()).done; ) yield piece.value;
}

// Until a key is needed, the page is hidden, or another connection takes its place. `pause` grows while none can be made.
async function follow() {
  stream?.abort();
  const own = (stream = new AbortController());
  for (let pause = 500; !own.signal.aborted; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
    try {
      const asked = chosen ? `?server=${encodeURIComponent(chosen)}` : "";
      const answer = await fetch(`/v1/cache/live${asked}`, { headers: headers(), signal: own.signal });
      if (answer.status === 401) return wantKey(key ? "This key is wrong." : "This server asks for a key.");
      if (answer.status === 403) return wantKey("This key is not the operator's.");
      if (answer.ok) {
        pause = 500;
        find("key").hidden = true;
        find("sections").hidden = false;
        await showServer(answer.headers.get("X-Quire-Server"));
        await read(answer.body);
      }
    } catch (error) {
      if (own.signal.aborted) return;
      if (!(error instanceof TypeError)) console.error(error);
    }
    state("The server does not answer. Trying again.", true);
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

find("key").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  key = find("key-text").value;
  find("key-text").value = "";
  follow();
});

find("server-name").addEventListener("change", (changed) => {
  chosen = changed.target.value;
  follow();
});

document.addEventListener("visibilitychange", () => (document.hidden ? stream?.abort() : follow()));
follow();
