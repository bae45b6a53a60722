/** Changes only what differs, so that focus, selection and what a screen reader reads survive an update. */

/**
 * @param {string} tag
 * @param {Record<string, string|number>} [attributes]
 * @param {...(Node|string)} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/**
 * @param {Element} node
 * @param {string} text
 */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * @param {Element} node
 * @param {string} name
 * @param {string|number} value
 */
export function setAttribute(node, name, value) {
  const text = String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/**
 * Make `nodes` the children of `parent`, in this order, moving only those that stand elsewhere.
 * @param {Element} parent
 * @param {Element[]} nodes
 */
export function setChildren(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, index) => {
    const there = parent.children[index];
    if (there !== node) parent.insertBefore(node, there ?? null);
  });
}

/**
 * Make the options of a select: those of `first`, then one for each name. The choice stays, if it still exists.
 * @param {HTMLSelectElement} select
 * @param {[string, string][]} first value and label
 * @param {string[]} names
 */
export function setOptions(select, first, names) {
  const wanted = [...first, ...names.map((name) => /** @type {[string, string]} */ ([name, name]))];
  const same =
    wanted.length === select.options.length && wanted.every(([value], i) => select.options[i].value === value);
  if (same) return;
  const chosen = select.value;
  select.replaceChildren(...wanted.map(([value, label]) => new Option(label, value, false, value === chosen)));
}
