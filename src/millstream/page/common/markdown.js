/**
 * Markdown of a model as safe elements. Everything passes DOMPurify; images become links, so that an answer cannot
 * fetch anything; links go to the web or to mail only.
 */

import { element, iconButton } from "./dom.js";
import DOMPurify from "../vendor/dompurify/purify.es.mjs";
import { Marked } from "../vendor/marked/marked.esm.js";
import { copyText } from "./clipboard.js";
import { formulas } from "./math.js";

const marked = new Marked({ gfm: true, breaks: true }, formulas);
const LINK = /^(?:https?:|mailto:)/i;

const RULES = {
  USE_PROFILES: { html: true, mathMl: true },
  FORBID_TAGS: [
    ...["style", "form", "input", "button", "select", "option", "textarea", "label", "fieldset", "dialog", "template"],
    ...["audio", "video", "source", "track", "picture", "map", "area", "svg", "title", "slot", "maction", "marquee"],
  ],
  FORBID_ATTR: ["style", "id", "name", "usemap", "srcset", "target", "tabindex", "autofocus", "popover", "hidden"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: LINK,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("uponSanitizeElement", (node) => {
  if (node instanceof Element && node.localName === "img") node.replaceWith(imageLink(node));
});

/** @param {Element} image */
function imageLink(image) {
  const source = image.getAttribute("src") ?? "";
  const words = `Image: ${image.getAttribute("alt") || source.slice(0, 80) || "without an address"}`;
  if (!LINK.test(source)) return document.createTextNode(words);
  const link = document.createElement("a");
  link.href = source;
  link.textContent = words;
  return link;
}

/** Draws a text into an element again and again while it grows. Blocks that did not change are left alone. */
export class MarkdownView {
  /** @param {HTMLElement} target */
  constructor(target) {
    this.target = target;
    /** @type {{raw: string, nodes: ChildNode[]}[]} */
    this.blocks = [];
  }

  /** @param {string} text */
  draw(text) {
    const tokens = marked.lexer(text);
    const kept = this.blocks.findIndex((block, index) => block.raw !== tokens[index]?.raw);
    const first = kept === -1 ? this.blocks.length : kept;
    for (const block of this.blocks.splice(first)) block.nodes.forEach((node) => node.remove());
    for (const token of tokens.slice(first)) {
      const part = safe(marked.parser(Object.assign([token], { links: tokens.links })));
      const nodes = [...part.childNodes];
      this.target.append(part);
      this.blocks.push({ raw: token.raw, nodes });
    }
  }
}

/** @param {string} html @returns {DocumentFragment} */
function safe(html) {
  const part = /** @type {DocumentFragment} */ (/** @type {unknown} */ (DOMPurify.sanitize(html, RULES)));
  for (const link of part.querySelectorAll("a[href]")) {
    link.setAttribute("target", "_blank");
    link.setAttribute("rel", "noopener noreferrer nofollow");
  }
  part.querySelectorAll("pre").forEach(frameCode);
  part.querySelectorAll("table").forEach(frameTable);
  part.querySelectorAll("math[display=block], math.tml-display").forEach(frameFormula);
  return part;
}

/** A bar over the code with its language and a button to copy it. @param {Element} pre */
function frameCode(pre) {
  const code = pre.querySelector("code");
  const language = /language-([\w+#.-]+)/.exec(code?.className ?? "")?.[1] ?? "";
  const button = iconButton("copy", "Copy the code", () => void copyText(code?.textContent ?? "", button));
  const frame = element("div", { class: "code" });
  pre.replaceWith(frame);
  pre.setAttribute("tabindex", "0");
  frame.append(element("div", { class: "code-bar" }, element("span", {}, language || "text"), button), pre);
}

/** Wide tables scroll by themselves. @param {Element} table */
function frameTable(table) {
  const frame = element("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
  table.replaceWith(frame);
  frame.append(table);
}

/** @param {Element} formula */
function frameFormula(formula) {
  const frame = element("div", { class: "formula", tabindex: "0", role: "region", "aria-label": "Formula" });
  formula.replaceWith(frame);
  frame.append(formula);
}
