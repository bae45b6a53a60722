/** Where the time of a request went: a bar with a segment for each phase, and the same in words. */

import { element } from "../common/dom.js";
import { span } from "./format.js";
import { setAttribute, setText } from "./update.js";

/** @typedef {import("./contract.js").RequestRecord} RequestRecord */

/** In the order in which a request goes through them. */
export const PHASES = ["prepare", "queue", "prefill", "decode"];

/**
 * The seconds of each phase of a request, in order. A phase that lasts ends at `now`.
 * @param {RequestRecord} request
 * @param {number} now by the server's clock
 * @returns {{name: string, seconds: number}[]}
 */
export function durations(request, now) {
  return PHASES.map((name) => {
    const own = request.phases.filter((phase) => phase.name === name);
    const seconds = own.reduce((total, phase) => total + Math.max((phase.end ?? now) - phase.start, 0), 0);
    return { name, seconds: own.length ? seconds : -1 };
  }).filter(({ seconds }) => seconds >= 0);
}

/** @param {{name: string, seconds: number}[]} spent */
export function inWords(spent) {
  return spent.map(({ name, seconds }) => `${name} ${span(seconds)}`).join(", ") || "not started";
}

/** The bar is as wide for every request: it shows shares, and the total stands in its own column. */
export class Timeline {
  #segments = PHASES.map((name) => element("span", { class: `phase phase-${name}` }));
  #words = element("span", { class: "visually-hidden" });

  constructor() {
    const bar = element("span", { class: "phases", "aria-hidden": "true" }, ...this.#segments);
    this.node = element("span", { class: "timeline" }, bar, this.#words);
  }

  /**
   * @param {RequestRecord} request
   * @param {number} now
   */
  show(request, now) {
    const spent = durations(request, now);
    const total = spent.reduce((sum, { seconds }) => sum + seconds, 0);
    this.#segments.forEach((segment, index) => {
      const found = spent.find(({ name }) => name === PHASES[index]);
      segment.hidden = !found || found.seconds === 0;
      segment.style.flexGrow = String(total > 0 && found ? Math.round((found.seconds / total) * 1000) : 0);
    });
    const words = inWords(spent);
    setText(this.#words, words);
    setAttribute(this.node, "title", words);
  }
}

/** The meaning of colours and patterns. */
export function legend() {
  return element(
    "ul",
    { class: "phase-legend", "aria-label": "Phases of a request" },
    ...PHASES.map((name) =>
      element("li", {}, element("span", { class: `phase phase-${name}`, "aria-hidden": "true" }), name),
    ),
  );
}
