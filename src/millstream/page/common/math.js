/** Formulas in Markdown: $…$, \(…\), $$…$$ and \[…\], rendered as MathML by Temml. */

import temml from "../vendor/temml/temml.min.js";

/** Stands for the attribute `style`, which the page's policy forbids in HTML. */
export const STYLE = "data-formula-style";

const INLINE = [/^\\\((.+?)\\\)/s, /^\$\$([^$]+?)\$\$/, /^\$(?![\s$])((?:\\.|[^$\\\n])+?)(?<!\s)\$(?!\d)/];
const BLOCK = [/^ {0,3}\$\$\s*\n?(.+?)\n?\s*\$\$ *(?:\n|$)/s, /^ {0,3}\\\[(.+?)\\\] *(?:\n|$)/s];

/** Options of marked: two more kinds of tokens. @type {import("../vendor/marked/marked.esm.js").MarkedExtension} */
export const formulas = {
  extensions: [
    {
      name: "formula",
      level: "inline",
      start: (source) => source.match(/\$|\\\(/)?.index,
      tokenizer: (source) => token("formula", INLINE, source),
      renderer: (found) => render(found.text, found.raw.startsWith("$$")),
    },
    {
      name: "formulaBlock",
      level: "block",
      start: (source) => source.match(/(?:^|\n) {0,3}(?:\$\$|\\\[)/)?.index,
      tokenizer: (source) => token("formulaBlock", BLOCK, source),
      renderer: (found) => render(found.text, true),
    },
  ],
};

/** @param {string} type @param {RegExp[]} patterns @param {string} source */
function token(type, patterns, source) {
  for (const pattern of patterns) {
    const match = pattern.exec(source);
    if (match && match[1].trim()) return { type, raw: match[0], text: match[1].trim() };
  }
  return undefined;
}

/** A formula that Temml cannot read is shown as it was written. @param {string} text @param {boolean} displayMode */
function render(text, displayMode) {
  try {
    const math = temml.renderToString(text, { displayMode, throwOnError: true, maxExpand: 500 });
    return math.replace(/(<[^<>]*?) style="/g, `$1 ${STYLE}="`);
  } catch {
    const code = document.createElement("code");
    code.textContent = text;
    return code.outerHTML;
  }
}
