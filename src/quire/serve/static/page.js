// The page: takes the events of /v1/cache/live, and has the sections show them. The key is in this variable alone.

import { find } from "./dom.js";
import { Sections } from "./sections.js";

const LONGEST_PAUSE_MS = 5000;

let key = "";
let stream = null;
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
  if (!answer.ok) throw new Error(found.error?.message ?? `the server answered ${answer.status}`);
  return found;
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
      const answer = await fetch("/v1/cache/live", { headers: headers(), signal: own.signal });
      if (answer.status === 401) return wantKey(key ? "This key is wrong." : "This server asks for a key.");
      if (answer.status === 403) return wantKey("This key is not the operator's.");
      if (answer.ok) {
        pause = 500;
        find("key").hidden = true;
        find("sections").hidden = false;
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

document.addEventListener("visibilitychange", () => (document.hidden ? stream?.abort() : follow()));
follow();
