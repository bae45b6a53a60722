/** The card of a model: what it does now, what it takes, and the button that loads or unloads it. */

import { element } from "../common/dom.js";
import { bytes, count, known, percent, plural, rate, span } from "./format.js";
import { Meter } from "./meter.js";
import { showState, stateLabel } from "./states.js";
import { setAttribute, setText } from "./update.js";

/** @typedef {import("./contract.js").Model} Model */
/** @typedef {import("./contract.js").Status} Status */
/** @typedef {import("./history.js").History} History */

/** Quantiles of the last requests are shown for so many seconds. */
const RECENT = 300;

/** @type {[string, string][]} */
const FIGURES = [
  ["speed", "tokens/s"],
  ["first", "to first token"],
  ["gap", "between tokens"],
];

/** @type {[string, string][]} */
const DETAILS = [
  ["reserved", "Reserved"],
  ["prompts", "Prompt tokens/s"],
  ["cached", "Prompt tokens from cache"],
  ["kv", "KV cache per token"],
  ["context", "Context"],
  ["restarts", "Restarts"],
  ["aliases", "Other names"],
  ["can", "Can do"],
  ["drafters", "Drafts by"],
  ["drafts", "Drafts that were right"],
];

/** A figure that has a name; `nodes` holds the element of each. */
class Names {
  /** @type {Record<string, HTMLElement>} */
  nodes = {};

  /**
   * @param {[string, string][]} entries id and label
   * @param {string} className
   */
  constructor(entries, className) {
    const pairs = entries.map(([id, label]) => {
      this.nodes[id] = element("dd");
      return element("div", { class: `pair ${id}` }, element("dt", {}, label), this.nodes[id]);
    });
    this.list = element("dl", { class: className }, ...pairs);
  }

  /** @param {Record<string, string>} texts a figure that is not known and not important is left out */
  show(texts) {
    for (const [id, text] of Object.entries(texts)) {
      setText(this.nodes[id], text);
      /** @type {HTMLElement} */ (this.nodes[id].parentElement).hidden = text === "";
    }
  }
}

export class Card {
  #state = stateLabel();
  #progress = /** @type {HTMLProgressElement} */ (element("progress", { max: "1", "aria-label": "Loaded" }));
  #error = element("p", { class: "notice error" });
  #figures = new Names(FIGURES, "figures");
  #rows = new Meter("Requests");
  #memory = new Meter("Memory");
  #kv = new Meter("KV cache");
  #prefix = new Meter("Prefix cache");
  #owner = element("p", { class: "owner" });
  #details = new Names(DETAILS, "details");
  #button = element("button", { type: "button", class: "button" });
  /** @type {Model} */
  #model;

  /**
   * @param {Model} model
   * @param {(model: Model, action: "load"|"unload") => void} act
   */
  constructor(model, act) {
    this.#model = model;
    const title = element("h3", { title: model.id }, model.id);
    const more = element("details", {}, element("summary", {}, "Details"), this.#details.list);
    this.node = element(
      "article",
      { class: "card", "aria-label": model.id, "data-model": model.id },
      element("header", {}, title, this.#state, this.#owner),
      this.#progress,
      this.#error,
      this.#figures.list,
      element("div", { class: "meters" }, this.#rows.node, this.#memory.node, this.#kv.node, this.#prefix.node),
      element("footer", {}, more, this.#button),
    );
    this.#button.addEventListener("click", () => act(this.#model, this.#action()));
  }

  /**
   * @param {Model} model
   * @param {History} history
   * @param {Status} status
   * @param {string} problem of the last button that was pressed
   * @param {boolean} changing true while its load or unload has not answered
   */
  show(model, history, status, problem, changing) {
    this.#model = model;
    const loading = model.state === "loading";
    showState(this.#state, model.state, loading && known(model.progress) ? percent(model.progress) : "");
    this.#showProgress(loading, model.progress);
    const error = problem || model.error || "";
    this.#error.hidden = error === "";
    setText(this.#error, error);
    setAttribute(this.node, "data-state", model.state);
    setText(this.#owner, owner(model));
    this.#showFigures(model, history);
    this.#showMeters(model, status);
    this.#showCaches(model, history);
    this.#showDetails(model, history, status);
    this.#showButton(changing);
  }

  /** @param {boolean} loading @param {number|null} progress */
  #showProgress(loading, progress) {
    this.#progress.hidden = !loading;
    if (known(progress)) this.#progress.value = progress;
    else this.#progress.removeAttribute("value");
  }

  /** @param {Model} model @param {History} history */
  #showFigures(model, history) {
    const loaded = model.state === "ready";
    this.#figures.list.hidden = !loaded;
    this.#figures.show({
      speed: rate(history.latest(model.id, "generated_tokens_per_second")),
      first: span(history.recent(model.id, "first_token_p50", RECENT)),
      gap: span(history.recent(model.id, "gap_p50", RECENT)),
    });
  }

  /** @param {Model} model @param {Status} status */
  #showMeters(model, status) {
    const loaded = model.state === "ready" || model.state === "unloading";
    this.#rows.node.hidden = !loaded;
    const rows = known(model.max_batch) ? `${count(model.active)} of ${count(model.max_batch)} running` : "";
    const queued = model.waiting ? `, ${count(model.waiting)} queued` : "";
    const share = model.max_batch ? model.active / model.max_batch : null;
    this.#rows.show((rows || `${count(model.active)} running`) + queued, share);

    const used = model.memory_bytes ?? 0;
    const limit = model.reserved_bytes ?? status.memory.budget_bytes;
    this.#memory.node.hidden = !loaded && !model.reserved_bytes;
    const cache = (model.prefix_cache_bytes ?? 0) / (limit || 1);
    this.#memory.show(memoryWords(model, status), limit ? used / limit : null, limit ? cache : 0);
  }

  /** @param {Model} model @param {History} history */
  #showCaches(model, history) {
    const loaded = model.state === "ready";
    const tokens = history.latest(model.id, "kv_tokens");
    this.#kv.node.hidden = !loaded || !known(tokens);
    this.#kv.show(plural(tokens ?? 0, "token"), null);
    this.#prefix.node.hidden = !loaded || !known(model.prefix_cache_bytes);
    this.#prefix.show(bytes(model.prefix_cache_bytes), null);
  }

  /** @param {Model} model @param {History} history @param {Status} status */
  #showDetails(model, history, status) {
    const share = history.recent(model.id, "cached_share", RECENT);
    const prompts = history.latest(model.id, "prompt_tokens_per_second");
    this.#details.show({
      reserved: reservedWords(model, status),
      prompts: known(prompts) ? rate(prompts) : "",
      cached: known(share) ? percent(share) : "",
      kv: model.kv_bytes_per_token ? bytes(model.kv_bytes_per_token) : "",
      context: known(model.context_length) ? plural(model.context_length, "token") : "",
      restarts: String(model.restarts),
      aliases: model.aliases.join(", "),
      can: model.capabilities.join(", "),
      drafters: model.speculation?.drafters.join(", ") ?? "",
      drafts: draftWords(model),
    });
  }

  #action() {
    return this.#model.state === "ready" ? "unload" : "load";
  }

  /** @param {boolean} changing */
  #showButton(changing) {
    const busy = changing || this.#model.state === "loading" || this.#model.state === "unloading";
    const words = { load: busy ? "Loading…" : "Load", unload: busy ? "Unloading…" : "Unload" };
    const action = this.#model.state === "unloading" ? "unload" : this.#action();
    const retry = this.#model.state === "failed" && !busy;
    const text = retry ? "Try again" : words[action];
    setText(this.#button, text);
    setAttribute(this.#button, "aria-label", `${text} ${this.#model.id}`);
    setAttribute(this.#button, "aria-disabled", String(busy));
    this.#button.hidden = this.#model.state === "stopped";
  }
}

/** @param {Model} model */
function owner(model) {
  if (model.isolation === "process") return known(model.pid) ? `Process ${model.pid}` : "A process of its own";
  return model.thread ? `Thread ${model.thread}` : "A thread of the server";
}

/** @param {Model} model @param {Status} status */
function memoryWords(model, status) {
  const limit = model.reserved_bytes ?? status.memory.budget_bytes;
  return known(limit) ? `${bytes(model.memory_bytes)} of ${bytes(limit)}` : bytes(model.memory_bytes);
}

/** @param {Model} model @param {Status} status */
function reservedWords(model, status) {
  const budget = status.memory.budget_bytes;
  if (!known(model.reserved_bytes)) return "";
  return known(budget) && budget > 0 ? `${percent(model.reserved_bytes / budget)} of the budget` : "";
}

/** @param {Model} model */
function draftWords(model) {
  const drafts = model.speculation?.drafts ?? [];
  const proposed = drafts.reduce((sum, each) => sum + each.proposed, 0);
  const accepted = drafts.reduce((sum, each) => sum + each.accepted, 0);
  return proposed ? `${percent(accepted / proposed)} of ${plural(proposed, "token")}` : "";
}
