// The page: takes the events of /v1/cache/live, and has the sections show them. The key is in this variable alone.

import { find, make } from "./dom.js";
import { Sections } from "./sections.js";

const LONGEST_PAUSE_MS = 5000;

let key = "";
let stream = null;
let turn = 0; // of `follow`: an earlier one ends when it sees a later
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

// A page that was open while its server was changed has old scripts: what they cannot draw is named, the rest is drawn.
function take(name, found) {
  const parts = Object.entries(name === "begin" ? { "What is served": () => sections.begin(found) } : sections.parts(found));
  const wrong = parts.filter(([, draw]) => {
    try {
      draw();
      return false;
    } catch (error) {
      console.error(error);
      return true;
    }
  });
  if (wrong.length) return state(`${wrong.map(([each]) => each).join(", ")}: this cannot be shown. Reload the page.`, true);
  if (name === "begin") return;
  const { status, reason, stuck } = found.health;
  const why = reason ?? stuck?.join("; ");
  state(status === "ok" ? "The engine works." : `${status}: ${why}`, status !== "ok");
}

// Until the end, or until a router says that its server has ended.
async function read(body) {
  let pending = "";
  for await (const chunk of pieces(body.pipeThrough(new TextDecoderStream()).getReader())) {
    pending += chunk;
    for (let end; (end = pending.indexOf("\n\n")) >= 0; pending = pending.slice(end + 2)) {
      const lines = pending.slice(0, end).split("\n");
      const data = lines.find((line) => line.startsWith("data: "));
      const name = lines.find((line) => line.startsWith("event: "))?.slice(7) ?? "";
      const found = data && JSON.parse(data.slice(6));
      if (found?.error) return;
      if (found) take(name, found);
    }
  }
}

async function* pieces(reader) {
  for (let piece; !(piece = await reader.read()).done; ) yield piece.value;
}

function stop() {
  turn += 1;
  stream?.abort();
}

// Until a key is needed, the page is hidden, or another connection takes its place. `pause` grows while none can be made.
// Each answer is aborted before the next is asked for: a browser has few connections for a host.
async function follow() {
  stop();
  const own = turn;
  for (let pause = 500; own === turn; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
    let why = "The server does not answer.";
    const attempt = (stream = new AbortController());
    try {
      const asked = chosen ? `?server=${encodeURIComponent(chosen)}` : "";
      const answer = await fetch(`/v1/cache/live${asked}`, { headers: headers(), signal: attempt.signal });
      if (answer.status === 401) return wantKey(key ? "This key is wrong." : "This server asks for a key.");
      if (answer.status === 403) return wantKey("This key is not the operator's.");
      if (answer.status === 429) why = (await answer.json()).error.message;
      if (answer.ok) {
        pause = 500;
        find("key").hidden = true;
        find("sections").hidden = false;
        await showServer(answer.headers.get("X-Quire-Server"));
        await read(answer.body);
      }
    } catch (error) {
      if (own !== turn) return;
      if (!(error instanceof TypeError)) console.error(error); // fetch's own, as what draws has caught its errors
    } finally {
      attempt.abort();
    }
    state(`${why} Trying again.`, true);
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

document.addEventListener("visibilitychange", () => (document.hidden ? stop() : follow()));
follow();
