/** Asks the server again and again: once a second while the page is seen, less often while it does not answer. */

import { ApiError } from "../common/api.js";

const PERIOD = 1000;
const LONGEST_PAUSE = 30_000;

/**
 * @typedef {object} PollState
 * @property {"live"|"paused"|"failing"} kind
 * @property {string} [message] What went wrong, in words.
 * @property {boolean} [needsKey] True if the server asks for an API key.
 * @property {number} [retryAt] When the next attempt is due, by `Date.now()`.
 */

export class Poller {
  /** @type {number|undefined} */
  #timer;
  #failures = 0;
  #asking = false;
  /** @type {() => Promise<void>} */
  #ask;
  /** @type {(state: PollState) => void} */
  #tell;

  /**
   * @param {() => Promise<void>} ask fetches and shows everything once
   * @param {(state: PollState) => void} tell
   */
  constructor(ask, tell) {
    this.#ask = ask;
    this.#tell = tell;
    document.addEventListener("visibilitychange", () => this.#seenOrHidden());
  }

  /** Ask now, whatever pause is left. */
  async now() {
    clearTimeout(this.#timer);
    if (this.#asking || document.hidden) return;
    this.#asking = true;
    try {
      await this.#ask();
      this.#failures = 0;
      this.#tell({ kind: document.hidden ? "paused" : "live" });
      this.#later(PERIOD);
    } catch (error) {
      this.#failures += 1;
      const pause = Math.min(PERIOD * 2 ** (this.#failures - 1), LONGEST_PAUSE);
      const message = error instanceof Error ? error.message : String(error);
      const needsKey = error instanceof ApiError && error.status === 401;
      this.#tell({ kind: "failing", message, needsKey, retryAt: Date.now() + pause });
      this.#later(pause);
    } finally {
      this.#asking = false;
    }
  }

  /** @param {number} milliseconds */
  #later(milliseconds) {
    clearTimeout(this.#timer);
    if (!document.hidden) this.#timer = setTimeout(() => this.now(), milliseconds);
  }

  #seenOrHidden() {
    if (!document.hidden) {
      this.now();
      return;
    }
    clearTimeout(this.#timer);
    this.#tell({ kind: "paused" });
  }
}
