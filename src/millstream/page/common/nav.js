/** The bar at the top: fills `<header class="nav" data-page="chat">`. */

import { element, find, icon, iconButton } from "./dom.js";
import { askForKey, storedKey } from "./key.js";

const ROOT = new URL("../../", import.meta.url);
const PAGES = [
  ["chat", "Chat", ""],
  ["dashboard", "Dashboard", "dashboard"],
  ["docs", "API", "docs"],
];

/** @param {...Node} tools buttons of this page, left of the theme */
export function mountNav(...tools) {
  const header = /** @type {HTMLElement} */ (find("header.nav"));
  const links = PAGES.map(([name, label, path]) =>
    element(
      "a",
      { href: new URL(path, ROOT).pathname, "aria-current": header.dataset.page === name ? "page" : null },
      label,
    ),
  );
  header.append(
    element("span", { class: "nav-brand" }, icon("wheel"), element("span", {}, "Millstream")),
    element("nav", { "aria-label": "Pages" }, ...links),
    element("div", { class: "nav-tools" }, ...tools, keyButton(), themeButton()),
  );
}

/** Shown once a key was given: to change it. */
function keyButton() {
  const button = iconButton("key", "Change the API key", () => void askForKey(), { hidden: !storedKey() });
  addEventListener("millstream:key", () => (button.hidden = !storedKey()));
  return button;
}

function themeButton() {
  const button = iconButton("sun", "Switch between light and dark", () => setTheme(isDark() ? "light" : "dark"));
  const draw = () => button.replaceChildren(icon(isDark() ? "sun" : "moon"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("millstream:theme", draw);
  draw();
  return button;
}

/** @returns {boolean} whether the page is shown dark now */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Plots and others that draw colours themselves listen to `millstream:theme`. @param {"light" | "dark"} theme */
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("millstream.theme", theme);
  } catch {
    // Storage is blocked: the choice holds until the page is closed.
  }
  dispatchEvent(new CustomEvent("millstream:theme"));
}
