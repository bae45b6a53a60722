/** A bar that shows how much of something is used, with the words for it above. */

import { element } from "../common/dom.js";
import { setText } from "./update.js";

export class Meter {
  #text = element("span", { class: "meter-text" });
  #used = element("span", { class: "used" });
  #part = element("span", { class: "part" });
  #bar = element("span", { class: "bar", "aria-hidden": "true" }, this.#used, this.#part);

  /** @param {string} label */
  constructor(label) {
    this.node = element(
      "div",
      { class: "meter" },
      element("span", { class: "meter-head" }, element("span", { class: "meter-label" }, label), this.#text),
      this.#bar,
    );
  }

  /**
   * @param {string} text what the bar shows, in words
   * @param {number|null} share from 0 to 1; null hides the bar
   * @param {number} [part] a part of that share, drawn apart
   */
  show(text, share, part = 0) {
    setText(this.#text, text);
    this.#bar.hidden = share === null;
    const used = Math.min(Math.max(share ?? 0, 0), 1);
    const apart = Math.min(Math.max(part, 0), used);
    this.#used.style.width = `${((used - apart) * 100).toFixed(1)}%`;
    this.#part.style.width = `${(apart * 100).toFixed(1)}%`;
  }
}
