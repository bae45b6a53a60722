/** The plots of the last minutes: which figures they show, of one model or of all. */

import { element } from "../common/dom.js";
import { bytes, count, rate, span } from "./format.js";
import { Plot, legendItem, showLegendItem } from "./plot.js";
import { byteTicks, spanTicks, wholeTicks } from "./scale.js";
import { setChildren, setOptions } from "./update.js";

/** @typedef {import("./contract.js").Figures} Figures */
/** @typedef {import("./history.js").History} History */
/** @typedef {import("./plot.js").Line} Line */
/** @typedef {Record<string, Figures>} Lists The figures of one model by name. */

/**
 * @typedef {object} Definition
 * @property {import("./plot.js").PlotKind} kind
 * @property {(lists: Lists) => Figures} each The line of a model among others.
 * @property {[string, string][]} parts Name and figure of the lines of a model alone.
 */

/** @type {Record<string, Definition>} */
const PLOTS = {
  generated: {
    kind: { title: "Tokens generated per second", format: rate },
    each: (lists) => lists.generated_tokens_per_second,
    parts: [["generated", "generated_tokens_per_second"]],
  },
  prompts: {
    kind: { title: "Prompt tokens per second", format: rate },
    each: (lists) => lists.prompt_tokens_per_second,
    parts: [["prompts", "prompt_tokens_per_second"]],
  },
  requests: {
    kind: { title: "Requests", format: count, scale: wholeTicks },
    each: (lists) => lists.active.map((active, index) => sum(active, lists.waiting[index])),
    parts: [
      ["running", "active"],
      ["queued", "waiting"],
    ],
  },
  first: {
    kind: { title: "Time to first token", format: span, scale: spanTicks },
    each: (lists) => lists.first_token_p50,
    parts: [
      ["median", "first_token_p50"],
      ["99th percentile", "first_token_p99"],
    ],
  },
  gap: {
    kind: { title: "Gap between tokens", format: span, scale: spanTicks },
    each: (lists) => lists.gap_p50,
    parts: [
      ["median", "gap_p50"],
      ["99th percentile", "gap_p99"],
    ],
  },
  memory: {
    kind: { title: "Memory", format: bytes, scale: byteTicks },
    each: (lists) => lists.memory_bytes,
    parts: [
      ["all of it", "memory_bytes"],
      ["prefix cache", "prefix_cache_bytes"],
    ],
  },
};

const MOST_LINES = 6;
const SPANS = /** @type {Record<string, string>} */ ({ 300: "5 min", 900: "15 min", 3600: "1 h" });

export class Plots {
  /** @type {number|null} */
  #cursor = null;
  /** @type {Map<string, Plot>} */
  #plots;
  #note = element("p", { class: "muted note" }, `The first ${MOST_LINES} models are drawn. Choose another to see it.`);
  #legend = element("ul", { class: "legend shared", "aria-label": "Models" });
  #history;
  #model;
  #spans;

  /**
   * @param {History} history
   * @param {HTMLElement} parent
   * @param {HTMLSelectElement} model
   * @param {HTMLElement} spans holds a radio button for each length of the window
   */
  constructor(history, parent, model, spans) {
    this.#history = history;
    this.#model = model;
    this.#spans = spans;
    const choose = (/** @type {number|null} */ time) => {
      this.#cursor = time;
      this.draw();
    };
    this.#plots = new Map(Object.entries(PLOTS).map(([id, { kind }]) => [id, new Plot(kind, `plot-${id}`, choose)]));
    parent.append(...[...this.#plots.values()].map((plot) => plot.node));
    parent.before(this.#legend);
    parent.after(this.#note);
    model.addEventListener("change", () => this.draw());
    spans.addEventListener("change", () => this.draw());
  }

  draw() {
    const names = [...this.#history.models.keys()];
    setOptions(this.#model, [["", "All models"]], names);
    const alone = names.length === 1 ? names[0] : this.#model.value;
    const { view, start } = this.#view(Boolean(alone));
    const used = names.filter((name) => this.#wasLoaded(name, start));
    const drawn = alone ? [alone] : used.slice(0, MOST_LINES);
    this.#note.hidden = Boolean(alone) || used.length <= MOST_LINES;
    this.#drawLegend(alone ? [] : drawn);
    for (const [id, plot] of this.#plots) {
      const lines = alone ? this.#partLines(PLOTS[id], alone) : this.#modelLines(PLOTS[id], drawn);
      plot.show(
        lines.map((line) => ({ ...line, values: line.values.slice(start) })),
        view,
      );
    }
  }

  /** @param {string[]} names */
  #drawLegend(names) {
    this.#legend.hidden = names.length === 0;
    const items = names.map((_, index) => this.#legend.children[index] ?? legendItem());
    items.forEach((item, index) => showLegendItem(item, names[index], index + 1));
    setChildren(this.#legend, items);
  }

  /**
   * True if the model took memory in the window: others would be lines at 0.
   * @param {string} name
   * @param {number} start the first sample of the window
   */
  #wasLoaded(name, start) {
    return this.#history.models.get(name)?.memory_bytes?.slice(start).some(Boolean) ?? false;
  }

  /** @param {boolean} named */
  #view(named) {
    const { times, now, interval } = this.#history;
    const checked = /** @type {HTMLInputElement|null} */ (this.#spans.querySelector("input:checked"));
    const seconds = Number(checked?.value ?? 300);
    const from = now - seconds;
    const found = times.findIndex((time) => time >= from);
    const start = found < 0 ? times.length : found;
    const words = SPANS[seconds] ?? `${seconds} s`;
    return {
      start,
      view: { times: times.slice(start), interval, from, to: now, span: words, named, cursor: this.#cursor },
    };
  }

  /** @param {Definition} plot @param {string[]} names @returns {Line[]} */
  #modelLines(plot, names) {
    return names.map((name, index) => {
      const values = plot.each(/** @type {Lists} */ (this.#history.models.get(name)));
      return { name, values, style: index + 1 };
    });
  }

  /** @param {Definition} plot @param {string} name @returns {Line[]} */
  #partLines(plot, name) {
    const lists = this.#history.models.get(name) ?? {};
    return plot.parts.map(([part, figure], index) => ({ name: part, values: lists[figure] ?? [], style: index + 1 }));
  }
}

/** @param {number|null} first @param {number|null} second */
function sum(first, second) {
  return first === null && second === null ? null : (first ?? 0) + (second ?? 0);
}
