/** Small helpers to build elements. Text goes in as text, never as HTML. */

/**
 * @typedef {Node | string | null | undefined | false} Child
 * @typedef {Record<string, unknown>} Attributes
 */

/**
 * Makes an element. Attributes that start with `on` are event listeners; `class`, `dataset` and booleans work as
 * expected; null and undefined are left out.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) setAttribute(made, name, value);
  made.append(...children.filter(isShown));
  return made;
}

/**
 * @param {HTMLElement} target
 * @param {string} name
 * @param {unknown} value
 */
function setAttribute(target, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name.startsWith("on")) {
    target.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
  } else if (name === "dataset") {
    Object.assign(target.dataset, value);
  } else if (name === "value" && "value" in target) {
    target.value = value;
  } else {
    target.setAttribute(name, value === true ? "" : String(value));
  }
}

/** @param {Child} child @returns {child is Node | string} */
function isShown(child) {
  return child !== null && child !== undefined && child !== false;
}

/**
 * Finds an element that the page's HTML has for certain.
 * @param {string} selector
 * @param {ParentNode} [root]
 * @returns {any}
 */
export function find(selector, root = document) {
  const found = root.querySelector(selector);
  if (!found) throw new Error(`the page has no ${selector}`);
  return found;
}

const SVG = "http://www.w3.org/2000/svg";

/** Line icons on a grid of 24 by 24. */
const ICONS = {
  arrow: ["M12 19V5", "M6 11l6-6 6 6"],
  attach: ["M20 11.5l-8.2 8.2a5 5 0 0 1-7-7L13 4.4a3.4 3.4 0 0 1 4.8 4.8l-8.3 8.2a1.7 1.7 0 0 1-2.4-2.4l7.6-7.6"],
  back: ["M15 5l-7 7 7 7"],
  check: ["M5 12.5l4.5 4.5L19 7.5"],
  close: ["M6 6l12 12", "M18 6L6 18"],
  copy: ["M9 9h10v11H9z", "M5 15V4h10"],
  download: ["M12 4v11", "M7 11l5 5 5-5", "M5 20h14"],
  edit: ["M4 20h4L19 9l-4-4L4 16z"],
  forward: ["M9 5l7 7-7 7"],
  key: ["M15 9a4 4 0 1 1-4-4 4 4 0 0 1 4 4z", "M13.5 12l6 6", "M17 15.5l2-2"],
  menu: ["M4 7h16", "M4 12h16", "M4 17h16"],
  microphone: ["M12 4a3 3 0 0 1 3 3v5a3 3 0 0 1-6 0V7a3 3 0 0 1 3-3z", "M5.5 11.5a6.5 6.5 0 0 0 13 0", "M12 18v3"],
  moon: ["M20 14.5A8 8 0 0 1 9.5 4a8 8 0 1 0 10.5 10.5z"],
  more: ["M5 12h.01", "M12 12h.01", "M19 12h.01"],
  plus: ["M12 5v14", "M5 12h14"],
  retry: ["M5 12a7 7 0 1 1 2.2 5.1", "M5 19v-4h4"],
  settings: ["M4 8h9", "M17 8h3", "M15 6v4", "M4 16h3", "M11 16h9", "M9 14v4"],
  speaker: ["M4 9.5h3.5L12 6v12l-4.5-3.5H4z", "M15.5 9a4.2 4.2 0 0 1 0 6", "M18 6.5a7.8 7.8 0 0 1 0 11"],
  stop: ["M7 7h10v10H7z"],
  sun: [
    "M12 8a4 4 0 1 1 0 8 4 4 0 0 1 0-8z",
    "M12 2v2",
    "M12 20v2",
    "M2 12h2",
    "M20 12h2",
    "M5 5l1.4 1.4",
    "M17.6 17.6L19 19",
    "M19 5l-1.4 1.4",
    "M6.4 17.6L5 19",
  ],
  trash: ["M5 7h14", "M10 7V4h4v3", "M7 7l1 13h8l1-13"],
  wheel: [
    "M12 3a9 9 0 1 1 0 18 9 9 0 0 1 0-18z",
    "M12 9.5a2.5 2.5 0 1 1 0 5 2.5 2.5 0 0 1 0-5z",
    "M12 3v6.5",
    "M12 14.5V21",
    "M3 12h6.5",
    "M14.5 12H21",
  ],
};

/** @param {keyof typeof ICONS} name */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  for (const line of ICONS[name]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", line);
    svg.append(path);
  }
  return svg;
}

/**
 * A button that shows only an icon. `label` is what a screen reader says and what the tooltip shows.
 * @param {keyof typeof ICONS} name
 * @param {string} label
 * @param {(event: MouseEvent) => void} onclick
 * @param {Attributes} [attributes]
 */
export function iconButton(name, label, onclick, attributes = {}) {
  return element(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...attributes },
    icon(name),
  );
}
