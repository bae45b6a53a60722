/** The path of a line through samples, with gaps where a figure is not known. */

/** @typedef {import("./contract.js").Figures} Figures */

/**
 * A sample without known neighbours is a dot: a segment of no length with round ends.
 * @param {number[]} times
 * @param {Figures} values
 * @param {(time: number) => number} x
 * @param {(value: number) => number} y
 * @param {number} longest seconds between two samples beyond which the line is broken
 */
export function linePath(times, values, x, y, longest) {
  /** @type {string[]} */
  const path = [];
  let before = -Infinity;
  let alone = false;
  times.forEach((time, index) => {
    const value = values[index];
    if (value === null || value === undefined) return;
    const joined = time - before <= longest && values[index - 1] !== null;
    if (!joined && alone) path.push("h0");
    path.push(`${joined ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`);
    alone = !joined;
    before = time;
  });
  if (alone) path.push("h0");
  return path.join("");
}

/**
 * The index of the sample nearest to `time`; -1 if there is none.
 * @param {number[]} times in ascending order
 * @param {number} time
 */
export function nearest(times, time) {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < time) low = middle + 1;
    else high = middle;
  }
  if (low === 0) return times.length ? 0 : -1;
  if (low === times.length) return times.length - 1;
  return time - times[low - 1] <= times[low] - time ? low - 1 : low;
}
