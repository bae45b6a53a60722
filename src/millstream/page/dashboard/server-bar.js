/** The line about the server itself: version, uptime, memory; and whether the figures are live. */

import { element } from "../common/dom.js";
import { askForKey } from "../common/key.js";
import { bytes, known, span } from "./format.js";
import { Meter } from "./meter.js";
import { setAttribute, setText } from "./update.js";

/** @typedef {import("./contract.js").Status} Status */
/** @typedef {import("./poll.js").PollState} PollState */

export class ServerBar {
  #memory = new Meter("Memory");
  #facts;
  #live;
  #notice;
  #reason = element("span");
  #wait = element("span");
  #button = element("button", { type: "button", class: "button" });
  #needsKey = false;
  /** @type {number|undefined} */
  #countdown;

  /**
   * @param {HTMLElement} facts
   * @param {HTMLElement} memory
   * @param {HTMLElement} live
   * @param {HTMLElement} notice
   * @param {() => void} retry
   */
  constructor(facts, memory, live, notice, retry) {
    this.#facts = facts;
    this.#live = live;
    this.#notice = notice;
    memory.append(this.#memory.node);
    this.#button.addEventListener("click", () => (this.#needsKey ? void askForKey() : retry()));
    // The countdown is for the eye: a screen reader hears the reason once.
    this.#wait.setAttribute("aria-hidden", "true");
    notice.append(element("span", { class: "words" }, this.#reason, " ", this.#wait), this.#button);
  }

  /** @param {Status} status */
  show({ version, uptime, memory, process }) {
    const facts = [
      `Millstream ${version}`,
      known(uptime) ? `up ${span(Math.max(Math.floor(uptime), 1)).replace(/\.0+ s$/, " s")}` : "",
      known(process.pid) ? `process ${process.pid}` : "",
      known(process.rss_bytes) ? `${bytes(process.rss_bytes)} resident` : "",
    ];
    setText(this.#facts, facts.filter(Boolean).join(" · "));
    const { budget_bytes: budget, used_bytes: used } = memory;
    const words = known(budget) ? `${bytes(used)} of ${bytes(budget)}` : `${bytes(used)}, no budget set`;
    this.#memory.show(words, known(budget) && known(used) && budget > 0 ? used / budget : null);
  }

  /** @param {PollState} state */
  tell(state) {
    clearInterval(this.#countdown);
    const words = { live: "Live", paused: "Paused", failing: "Not live" };
    setAttribute(this.#live, "data-kind", state.kind);
    setText(this.#live, words[state.kind]);
    this.#notice.hidden = state.kind !== "failing";
    document.body.classList.toggle("stale", state.kind === "failing");
    if (state.kind !== "failing") return;
    this.#needsKey = state.needsKey ?? false;
    setText(this.#reason, this.#needsKey ? "This server asks for an API key." : (state.message ?? ""));
    setText(this.#button, this.#needsKey ? "Enter the key" : "Try now");
    this.#wait.hidden = this.#needsKey;
    if (this.#needsKey) return;
    const count = () => {
      const seconds = Math.max(Math.ceil(((state.retryAt ?? 0) - Date.now()) / 1000), 0);
      setText(this.#wait, seconds ? `Trying again in ${seconds} s.` : "Trying again.");
    };
    count();
    this.#countdown = setInterval(count, 1000);
  }
}
