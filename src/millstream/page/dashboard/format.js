/** Figures as people read them. A figure that is not known is a dash. */

export const UNKNOWN = "–";

/**
 * @param {number|null|undefined} value
 * @returns {value is number}
 */
export function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/**
 * A whole number with thousands separated by thin spaces: 12 345.
 * @param {number|null|undefined} value
 */
export function count(value) {
  return known(value) ? String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, "\u202f") : UNKNOWN;
}

/**
 * Three digits at most: 0.12, 3.4, 56, 1234.
 * @param {number|null|undefined} value
 */
export function rate(value) {
  if (!known(value)) return UNKNOWN;
  if (value === 0) return "0";
  if (value < 1) return value.toFixed(2);
  return value < 20 ? value.toFixed(1) : count(value);
}

const BYTE_UNITS = ["B", "kB", "MB", "GB", "TB"];

/** @param {number|null|undefined} value */
export function bytes(value) {
  if (!known(value)) return UNKNOWN;
  let size = value;
  let unit = 0;
  while (size >= 999.5 && unit < BYTE_UNITS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  const digits = unit > 1 && size < 99.5 ? (size < 9.95 ? 2 : 1) : 0;
  return `${size.toFixed(digits)} ${BYTE_UNITS[unit]}`;
}

/**
 * A span: 0.4 ms, 85 ms, 1.2 s, 3 min 20 s, 2 h 5 min, 4 d 3 h.
 * @param {number|null|undefined} seconds
 */
export function span(seconds) {
  if (!known(seconds)) return UNKNOWN;
  const value = Math.max(seconds, 0);
  if (value === 0) return "0 ms";
  if (value < 0.00095) return "< 1 ms";
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(2)} s`;
  if (value < 59.95) return `${value.toFixed(1)} s`;
  return longSpan(Math.round(value));
}

/** @param {number} seconds */
function longSpan(seconds) {
  const steps = /** @type {[number, string][]} */ ([
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
    [1, "s"],
  ]);
  const largest = steps.findIndex(([size]) => seconds >= size);
  const [size, unit] = steps[largest];
  const parts = [`${Math.floor(seconds / size)} ${unit}`];
  const next = steps[largest + 1];
  const rest = next ? Math.floor((seconds % size) / next[0]) : 0;
  if (next && rest) parts.push(`${rest} ${next[1]}`);
  return parts.join(" ");
}

/** @param {number|null|undefined} share from 0 to 1 */
export function percent(share) {
  return known(share) ? `${Math.round(share * 100)} %` : UNKNOWN;
}

/**
 * The time of day, in the reader's time zone: 14:03:21.
 * @param {number} seconds since 1970
 */
export function clock(seconds) {
  const date = new Date(seconds * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

/**
 * A figure as a mark of an axis, without zeros that say nothing: "1.5 s" for "1.50 s", "0" for "0 ms".
 * @param {string} text
 */
export function mark(text) {
  return text
    .replace(/(\.\d*?)0+(?=\s|$)/, "$1")
    .replace(/\.(?=\s|$)/, "")
    .replace(/^0 .*/, "0");
}

/**
 * "1 request", "3 requests".
 * @param {number} number
 * @param {string} noun
 */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
