/** The path of a line through samples, with gaps where a figure is not known. */

/** @typedef {import("./contract.js").Figures} Figures */

/**
 * The line, and apart from it a dot for each sample without known neighbours: segments of no length with round ends.
 * @param {number[]} times
 * @param {Figures} values
 * @param {(time: number) => number} x
 * @param {(value: number) => number} y
 * @param {number} longest seconds between two samples beyond which the line is broken
 */
export function linePaths(times, values, x, y, longest) {
  /** @type {string[][]} each run of known samples, as its points */
  const runs = [];
  let before = -Infinity;
  times.forEach((time, index) => {
    const value = values[index];
    if (value === null || value === undefined) {
      before = -Infinity;
      return;
    }
    if (time - before > longest) runs.push([]);
    runs[runs.length - 1].push(`${x(time).toFixed(1)} ${y(value).toFixed(1)}`);
    before = time;
  });
  const lines = runs.filter((run) => run.length > 1).map((run) => `M${run.join("L")}`);
  const dots = runs.filter((run) => run.length === 1).map(([point]) => `M${point}h0`);
  return { line: lines.join(""), dots: dots.join("") };
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
