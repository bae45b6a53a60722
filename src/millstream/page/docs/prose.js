/** Descriptions of the API's document, which are Markdown with lines of the source code's width. */

import { element } from "../common/dom.js";
import { MarkdownView } from "../common/markdown.js";

/** @param {string} text */
export function prose(text) {
  const target = element("div", { class: "prose" });
  new MarkdownView(target).draw(text.replace(/(\S)\n(?=[^\s*-])/g, "$1 "));
  return target;
}
