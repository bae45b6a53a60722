/** The samples of the last hour, put together from answers that each hold what is new. */

/** @typedef {import("./contract.js").HistoryAnswer} HistoryAnswer */
/** @typedef {import("./contract.js").Figures} Figures */

export const KEPT_SECONDS = 3600;

export class History {
  constructor() {
    /** Seconds between two samples. */
    this.interval = 5;
    /** The server's clock when it answered last, and ours. */
    this.answered = { server: 0, here: 0 };
    /** @type {number[]} */
    this.times = [];
    /** @type {Map<string, Record<string, Figures>>} */
    this.models = new Map();
  }

  /** The time of the last sample, or 0: what to ask the server for. */
  get last() {
    return this.times.at(-1) ?? 0;
  }

  /** The server's clock: the right edge of the plots. */
  get now() {
    return this.answered.server + (performance.now() - this.answered.here) / 1000;
  }

  /** True if there cannot be a sample that is newer than the last. */
  isCurrent() {
    return this.times.length > 0 && this.now < this.last + this.interval;
  }

  /**
   * Add the samples of an answer. If the server's clock went back, the samples from before are forgotten.
   * @param {HistoryAnswer} answer
   */
  add(answer) {
    if (answer.now < this.last) this.#forget(Infinity);
    this.interval = answer.interval;
    this.answered = { server: answer.now, here: performance.now() };
    const first = answer.times.findIndex((time) => time > this.last);
    if (first >= 0) this.#append(answer, first);
    this.#forget(answer.now - KEPT_SECONDS);
  }

  /**
   * The figure of the last sample.
   * @param {string} model
   * @param {string} figure
   * @returns {number|null}
   */
  latest(model, figure) {
    return this.recent(model, figure, 0);
  }

  /**
   * The last figure within `seconds` that is known: quantiles are null in a sample without a request.
   * @param {string} model
   * @param {string} figure
   * @param {number} seconds
   * @returns {number|null}
   */
  recent(model, figure, seconds) {
    const figures = this.models.get(model)?.[figure] ?? [];
    for (let index = figures.length - 1; index >= 0 && this.times[index] >= this.last - seconds; index -= 1) {
      const value = figures[index];
      if (value !== null && value !== undefined) return value;
    }
    return null;
  }

  /**
   * @param {HistoryAnswer} answer
   * @param {number} first the index of its first new sample
   */
  #append(answer, first) {
    const had = this.times.length;
    this.times.push(...answer.times.slice(first));
    for (const [model, lists] of Object.entries(answer.models)) {
      const own = this.models.get(model) ?? {};
      this.models.set(model, own);
      for (const [figure, values] of Object.entries(lists)) {
        own[figure] ??= new Array(had).fill(null);
        own[figure].push(...values.slice(first));
      }
    }
    this.#pad();
  }

  /** A model that is not in an answer has no figures for its samples. */
  #pad() {
    for (const lists of this.models.values()) {
      for (const values of Object.values(lists)) {
        while (values.length < this.times.length) values.push(null);
      }
    }
  }

  /** @param {number} before */
  #forget(before) {
    const old = this.times.findIndex((time) => time >= before);
    const gone = old < 0 ? this.times.length : old;
    if (gone === 0) return;
    this.times.splice(0, gone);
    for (const lists of this.models.values()) {
      for (const values of Object.values(lists)) values.splice(0, gone);
    }
  }
}
