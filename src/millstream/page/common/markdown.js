/**
 * Markdown of a model as safe elements. HTML in it is shown as text, but for a few plain tags; images become links, so
 * that an answer cannot fetch anything; links go to the web or to mail only. After that, everything passes DOMPurify.
 */

import DOMPurify from "../vendor/dompurify/purify.es.mjs";
import { Marked } from "../vendor/marked/marked.esm.js";
import { copyText } from "./clipboard.js";
import { element, iconButton } from "./dom.js";
import { formulas, STYLE } from "./math.js";

const LINK = /^(?:https?:|mailto:)/i;
/** DOMPurify holds this against the values of most attributes: no other scheme, but words and numbers. */
const VALUE = /^(?:(?:https?|mailto):|[^a-z]|[a-z+.-]+(?:[^a-z+.:-]|$))/i;
const PLAIN_TAG = /&lt;(\/?(?:b|strong|i|em|u|s|del|sub|sup|kbd|mark|small|br|hr|details|summary))\s*\/?&gt;/gi;

/** @type {import("../vendor/marked/marked.esm.js").RendererObject} */
const renderer = {
  html: ({ text }) => escaped(text).replace(PLAIN_TAG, "<$1>"),
  image: ({ href, text }) => `<a href="${escaped(href)}">Image: ${escaped(text || href.slice(0, 80))}</a>`,
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
};
const marked = new Marked({ gfm: true, breaks: true, renderer }, formulas);

const RULES = {
  USE_PROFILES: { html: true, mathMl: true },
  FORBID_TAGS: [
    ...["style", "form", "input", "button", "select", "option", "textarea", "label", "fieldset", "dialog", "template"],
    ...["img", "audio", "video", "source", "track", "picture", "map", "area", "svg", "title", "slot", "maction"],
  ],
  FORBID_ATTR: ["style", "id", "name", "usemap", "srcset", "target", "tabindex", "autofocus", "popover", "hidden"],
  ADD_ATTR: [STYLE],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: VALUE,
  RETURN_DOM_FRAGMENT: true,
};

/** @param {string} text */
function escaped(text) {
  return text
    .replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`)
    .replaceAll("&#60;", "&lt;")
    .replaceAll("&#62;", "&gt;");
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
  part.querySelectorAll("[href]").forEach(guardLink);
  part.querySelectorAll(`[${STYLE}]`).forEach(applyStyle);
  part.querySelectorAll("pre").forEach(frameCode);
  part.querySelectorAll("table").forEach(frameTable);
  part.querySelectorAll("math[display=block], math.tml-display").forEach(frameFormula);
  return part;
}

/** Links open a new tab that knows nothing of this one. Links within this server are words. @param {Element} link */
function guardLink(link) {
  if (link.localName === "a" && LINK.test(link.getAttribute("href") ?? "")) {
    link.setAttribute("target", "_blank");
    link.setAttribute("rel", "noopener noreferrer nofollow");
  } else {
    link.removeAttribute("href");
  }
}

/** The page's policy allows styles of scripts, but none in HTML. @param {Element} part of a formula */
function applyStyle(part) {
  const style = part.getAttribute(STYLE) ?? "";
  part.removeAttribute(STYLE);
  if (!/url|image|@/i.test(style)) /** @type {MathMLElement} */ (part).style.cssText = style;
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
