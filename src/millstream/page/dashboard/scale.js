/** Where the lines of an axis stand. */

/**
 * Ticks from 0 to a round number that is not less than `top`: at most `most` + 1 of them.
 * @param {number} top
 * @param {number} most
 * @param {number[]} steps round numbers between 1 and 10, in ascending order
 * @returns {number[]}
 */
export function ticks(top, most = 3, steps = [1, 2, 2.5, 5, 10]) {
  const least = (top > 0 ? top : 1) / most;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * (steps.find((factor) => factor * power >= least * 0.9999) ?? 10);
  const number = Math.max(1, Math.ceil((top > 0 ? top : 1) / step - 0.0001));
  return Array.from({ length: number + 1 }, (_, index) => index * step);
}

/** As `ticks`, for what comes in whole pieces. @param {number} top */
export function wholeTicks(top) {
  return top <= 3 ? ticks(Math.max(Math.ceil(top), 1), Math.max(Math.ceil(top), 1), [1]) : ticks(top, 3, [1, 2, 5, 10]);
}

/** As `ticks`; a millisecond at least, so that a plot without figures has ticks too. @param {number} top */
export function spanTicks(top) {
  return ticks(top > 0 ? Math.max(top, 0.003) : 0.1);
}

/** @param {number} top */
export function byteTicks(top) {
  return ticks(top > 0 ? top : 1e6);
}
