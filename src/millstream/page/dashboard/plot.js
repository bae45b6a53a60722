/** One plot: lines over time, with a read-out by mouse, touch and keyboard. The figures under the title are those of
 * the chosen moment, or the latest ones. */

import { element } from "../common/dom.js";
import { UNKNOWN, clock, known, mark } from "./format.js";
import { linePaths, nearest } from "./line.js";
import { ticks } from "./scale.js";
import { setAttribute, setChildren, setText, svg } from "./update.js";

/** @typedef {import("./contract.js").Figures} Figures */

/**
 * @typedef {object} Line
 * @property {string} name
 * @property {Figures} values
 * @property {number} style Which colour and dashes it has, from 1.
 *
 * @typedef {object} View
 * @property {number[]} times The samples in the window.
 * @property {number} interval Seconds between two samples.
 * @property {number} from
 * @property {number} to
 * @property {string} span The window's length in words.
 * @property {number|null} cursor The chosen moment.
 * @property {boolean} named True if the plot itself names its lines; false if one legend does so for all plots.
 *
 * @typedef {object} PlotKind
 * @property {string} title
 * @property {(value: number|null) => string} format
 * @property {(top: number) => number[]} [scale] The ticks of the vertical axis.
 */

const HEIGHT = 132;
const MARGIN = { top: 8, right: 6, bottom: 18, left: 52 };

export class Plot {
  /** @type {PlotKind} */
  #kind;
  /** @type {(time: number|null) => void} */
  #choose;
  /** @type {{lines: Line[], view: View}|null} */
  #shown = null;
  #width = 320;
  #legend = element("ul", { class: "legend" });
  #moment = element("span", { class: "moment" });
  #summary = element("p", { class: "visually-hidden" });
  #frame = element("div", { class: "frame", role: "slider", tabindex: "0" });
  #grid = svg("g", { class: "grid" });
  #paths = svg("g", { class: "lines" });
  #cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
  #svg = svg("svg", { "aria-hidden": "true", height: HEIGHT });

  /**
   * @param {PlotKind} kind
   * @param {string} id
   * @param {(time: number|null) => void} choose called with the moment that the reader points at
   */
  constructor(kind, id, choose) {
    this.#kind = kind;
    this.#choose = choose;
    this.#summary.id = `${id}-summary`;
    this.#frame.setAttribute("aria-label", `${kind.title}: choose a moment`);
    this.#frame.setAttribute("aria-describedby", this.#summary.id);
    this.#svg.append(this.#grid, this.#paths, this.#cursor);
    this.#frame.append(this.#svg);
    const title = element("h3", {}, kind.title);
    this.node = element("figure", { class: "plot", id });
    this.node.append(element("figcaption", {}, title, this.#moment), this.#legend, this.#frame, this.#summary);
    this.#listen();
    new ResizeObserver(() => this.#resized()).observe(this.#frame);
  }

  /**
   * @param {Line[]} lines
   * @param {View} view
   */
  show(lines, view) {
    this.#shown = { lines, view };
    this.#draw();
  }

  #resized() {
    this.#width = Math.max(this.#frame.clientWidth, 160);
    this.#draw();
  }

  #draw() {
    if (!this.#shown) return;
    const { lines, view } = this.#shown;
    const top = Math.max(0, ...lines.flatMap((line) => line.values.filter(known)));
    const marks = (this.#kind.scale ?? ticks)(top);
    const highest = marks[marks.length - 1];
    const inner = this.#width - MARGIN.left - MARGIN.right;
    const x = (/** @type {number} */ time) => MARGIN.left + ((time - view.from) / (view.to - view.from)) * inner;
    const height = HEIGHT - MARGIN.top - MARGIN.bottom;
    const y = (/** @type {number} */ value) => MARGIN.top + (1 - value / highest) * height;
    setAttribute(this.#svg, "width", this.#width);
    this.#drawGrid(marks, y, view);
    const paths = lines.flatMap((each) => {
      const { line, dots } = linePaths(view.times, each.values, x, y, view.interval * 2.5);
      return [
        svg("path", { class: `line line-${each.style}`, d: line }),
        svg("path", { class: `line line-${each.style} dots`, d: dots }),
      ];
    });
    this.#paths.replaceChildren(...paths);
    const index = view.cursor === null ? -1 : nearest(view.times, view.cursor);
    this.#drawCursor(index, index < 0 ? 0 : x(view.times[index]));
    this.#tell(lines, view, index);
  }

  /**
   * @param {number[]} marks
   * @param {(value: number) => number} y
   * @param {View} view
   */
  #drawGrid(marks, y, view) {
    const right = this.#width - MARGIN.right;
    const rows = marks.flatMap((value) => [
      svg("line", { x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) }),
      svg("text", { x: MARGIN.left - 8, y: y(value) + 4, class: "mark" }, mark(this.#kind.format(value))),
    ]);
    const base = HEIGHT - 3;
    this.#grid.replaceChildren(
      ...rows,
      svg("text", { x: MARGIN.left, y: base, class: "from" }, `${view.span} ago`),
      svg("text", { x: right, y: base, class: "to" }, "now"),
    );
  }

  /**
   * @param {number} index
   * @param {number} x
   */
  #drawCursor(index, x) {
    this.#cursor.classList.toggle("gone", index < 0);
    setAttribute(this.#cursor, "x1", x);
    setAttribute(this.#cursor, "x2", x);
  }

  /**
   * The figures in words: in the legend, for the slider, and as a summary of the window.
   * @param {Line[]} lines
   * @param {View} view
   * @param {number} index of the chosen sample; -1 for the latest
   */
  #tell(lines, view, index) {
    const last = view.times.length - 1;
    const at = index < 0 ? last : index;
    const { format } = this.#kind;
    const said = lines.map((line) => ({ line, text: format(line.values[at] ?? null) }));
    setText(this.#moment, index < 0 ? "" : clock(view.times[index]));
    this.#drawLegend(said, view.named);
    // Times, not positions: those change while the window moves, and a screen reader would say so.
    const [first, chosen, newest] = [0, at, last].map((position) => Math.round(view.times[position] ?? 0));
    setAttribute(this.#frame, "aria-valuemin", first);
    setAttribute(this.#frame, "aria-valuenow", chosen);
    setAttribute(this.#frame, "aria-valuemax", newest);
    const words = said.map(({ line, text }) => `${line.name} ${text === UNKNOWN ? "unknown" : text}`);
    const value = at < 0 ? "no figures yet" : `${clock(view.times[at])}: ${words.join(", ")}`;
    setAttribute(this.#frame, "aria-valuetext", value);
    setText(this.#summary, this.#summarise(lines, view));
  }

  /** @param {{line: Line, text: string}[]} said @param {boolean} named */
  #drawLegend(said, named) {
    setAttribute(this.#legend, "class", said.length === 1 ? "legend alone" : named ? "legend" : "legend nameless");
    const items = said.map(({ line, text }, index) => {
      const item = this.#legend.children[index] ?? legendItem();
      showLegendItem(item, line.name, line.style, text);
      return item;
    });
    setChildren(this.#legend, items);
  }

  /**
   * @param {Line[]} lines
   * @param {View} view
   */
  #summarise(lines, view) {
    const { format } = this.#kind;
    const parts = lines.map((line) => {
      const values = line.values.filter(known);
      if (values.length === 0) return `${line.name}: no figures.`;
      const now = line.values.at(-1) ?? null;
      const range = `between ${format(Math.min(...values))} and ${format(Math.max(...values))}`;
      return `${line.name}: ${range}${known(now) ? `, now ${format(now)}` : ""}.`;
    });
    return `The last ${view.span}. ${parts.join(" ") || "No figures yet."}`;
  }

  #listen() {
    for (const name of ["pointermove", "pointerdown"]) {
      this.#frame.addEventListener(name, (event) => this.#point(/** @type {PointerEvent} */ (event).clientX));
    }
    this.#frame.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") this.#choose(null); // a finger that is lifted has chosen
    });
    this.#frame.addEventListener("blur", () => this.#choose(null));
    this.#frame.addEventListener("focus", () => {
      if (this.#frame.matches(":focus-visible")) this.#choose(this.#shown?.view.times.at(-1) ?? null);
    });
    this.#frame.addEventListener("keydown", (event) => this.#key(event));
  }

  /** @param {number} x in the window of the browser */
  #point(x) {
    const view = this.#shown?.view;
    if (!view || view.times.length === 0) return;
    const share =
      (x - this.#frame.getBoundingClientRect().left - MARGIN.left) / (this.#width - MARGIN.left - MARGIN.right);
    this.#choose(view.from + Math.min(Math.max(share, 0), 1) * (view.to - view.from));
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const view = this.#shown?.view;
    if (!view || view.times.length === 0) return;
    const last = view.times.length - 1;
    const at = view.cursor === null ? last : nearest(view.times, view.cursor);
    /** @type {Record<string, number|null>} */
    const targets = {
      ArrowLeft: at - 1,
      ArrowDown: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at + 1,
      PageUp: at + 12,
      PageDown: at - 12,
      Home: 0,
      End: last,
      Escape: null,
    };
    if (!(event.key in targets)) return;
    event.preventDefault();
    const target = targets[event.key];
    this.#choose(target === null ? null : view.times[Math.min(Math.max(target, 0), last)]);
  }
}

export function legendItem() {
  const key = svg("svg", { class: "key", width: 18, height: 8, "aria-hidden": "true" });
  key.append(svg("path", { d: "M1 4H17" }));
  return element("li", {}, key, element("span", { class: "name" }), element("span", { class: "value" }));
}

/**
 * @param {Element} item made by `legendItem`
 * @param {string} label
 * @param {number} style
 * @param {string} [text]
 */
export function showLegendItem(item, label, style, text = "") {
  const [key, name, value] = [...item.children];
  setAttribute(key.children[0], "class", `line line-${style}`);
  setText(name, label);
  setText(value, text);
}
