// The last requests, and a prompt as a strip: which of its tokens were cached, and why the others were computed.

import { clock, count, expected, find, make, put, seconds, share, table } from "./dom.js";
import { CAUSES, dot, strip } from "./parts.js";

const short = (id) => (id.length > 20 ? `${id.slice(0, 16)}…` : id);

export class Prompts {
  constructor(ask) {
    this.ask = ask;
    find("explain").addEventListener("submit", (submitted) => {
      submitted.preventDefault();
      this.explain(find("explain-id").value.trim());
    });
  }

  show(requests, pageSize) {
    this.pageSize = pageSize;
    const known = requests.toReversed();
    put(find("requests"), known.map((each) => each.id), () => [known.length === 0
      ? make("p", { class: "hint" }, "No request has ended yet.")
      : table("The last requests, the newest first", ["request", "ended", "prompt", "cached", "output", "first token", "seconds", "end"],
          known.map((each) => this.row(each)))]);
  }

  row({ id, client_id: own, at, usage, first_token_s: first, seconds: took, ends }) {
    const { cached_tokens: cached, cached_tokens_by_tier: tiers } = usage.prompt_tokens_details;
    const where = tiers && cached ? ` (${Object.entries(tiers).filter(([, tokens]) => tokens).map(([tier, tokens]) => `${tier} ${count(tokens)}`).join(", ")})` : "";
    return [
      make("button", { type: "button", class: "link", "data-id": id, title: `${id}, X-Request-Id: ${own}`, "aria-label": `Explain ${id}`, onclick: () => this.explain(id) }, short(id)),
      clock(at), count(usage.prompt_tokens),
      `${count(cached)}, ${share(cached, usage.prompt_tokens)}${where}`,
      count(usage.completion_tokens), seconds(first), seconds(took), ends,
    ];
  }

  async explain(id) {
    const place = find("explained");
    find("explain-id").value = id;
    try {
      const { explanations } = await this.ask(`/v1/cache/explain/${encodeURIComponent(id)}?texts=true`);
      place.replaceChildren(...explanations.map((each) => this.strip(each)));
    } catch (error) {
      place.replaceChildren(make("p", { class: "bad" }, error.message));
    }
    place.scrollIntoView({ block: "nearest" });
  }

  strip({ sequence, prompt_tokens: whole, hit_tokens: hits, reasons, texts }) {
    const rows = reasons.map(({ cause, tier, start, tokens, detail, by, ...policy }) => [
      `${count(start)} to ${count(start + tokens - 1)}`, count(tokens),
      make("span", {}, dot({ cause, tier }), cause),
      make("span", {}, detail ?? (tier ? `on the ${tier}` : CAUSES.find(({ name }) => name === cause)?.about ?? ""), cause === "evicted" && by ? this.link(by) : null, policy.kind ? `; ${expected(policy)}` : null),
    ]);
    return make("div", { class: "explained" },
      make("h3", {}, sequence, make("small", {}, ` ${count(hits)} of ${count(whole)} prompt tokens were reused, ${share(hits, whole)}`)),
      ...strip(reasons, whole, this.pageSize),
      texts?.length ? make("pre", { class: "scrolls", role: "region", "aria-label": "The text of the prompt", tabindex: 0 },
        reasons.map((each, at) => [dot(each), texts[at]]).flat()) : null,
      table("Why, from the first token on", ["tokens", "count", "cause", "detail"], rows));
  }

  // The request for which others had to go: the first, if there were several.
  link(by) {
    const id = by.split(" and ")[0];
    return /^[\w.-]+$/.test(id) ? make("button", { type: "button", class: "link after", "aria-label": `Explain ${id}`, onclick: () => this.explain(id) }, "Explain it") : null;
  }
}
