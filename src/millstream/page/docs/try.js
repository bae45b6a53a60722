/** A form that sends a request to the server and shows what comes back, streams included. */

import { api } from "../common/api.js";
import { element } from "../common/dom.js";

const LONGEST = 200_000;

/**
 * @param {string} method
 * @param {string} path
 * @param {any} operation
 */
export function tryForm(method, path, operation) {
  const inputs = (operation.parameters ?? []).map((/** @type {any} */ parameter) => parameterField(parameter));
  const examples = Object.values(operation.requestBody?.content?.["application/json"]?.examples ?? {});
  const body = operation.requestBody
    ? element("textarea", {
        class: "input mono",
        rows: "8",
        spellcheck: "false",
        value: JSON.stringify(examples[0]?.value ?? {}, null, 2),
      })
    : null;
  const status = element("p", { class: "muted", role: "status" });
  const output = element("pre", { class: "output", tabindex: "0", "aria-label": "Response", hidden: true });
  const send = element("button", { class: "button primary", type: "submit" }, "Send");
  const stop = element(
    "button",
    { class: "button", type: "button", hidden: true, onclick: () => controller?.abort() },
    "Stop",
  );
  /** @type {AbortController | null} */
  let controller = null;

  /** @param {Event} event */
  async function submit(event) {
    event.preventDefault();
    controller = new AbortController();
    output.textContent = "";
    output.hidden = false;
    stop.hidden = false;
    status.textContent = "Sending…";
    try {
      const options = { method: method.toUpperCase(), body: body?.value, signal: controller.signal, ask: true };
      const headers = new Headers(body ? { "Content-Type": "application/json" } : {});
      const response = await api(filled(path, inputs), { ...options, headers });
      status.textContent = `Status ${response.status}`;
      await show(response, output);
    } catch (error) {
      status.textContent = controller.signal.aborted
        ? "Stopped."
        : error instanceof Error
          ? error.message
          : String(error);
      output.hidden = !output.textContent;
    } finally {
      stop.hidden = true;
    }
  }

  return element(
    "form",
    { class: "try", onsubmit: (/** @type {Event} */ event) => void submit(event) },
    ...inputs.map((/** @type {{field: HTMLElement}} */ each) => each.field),
    body && element("label", { class: "field" }, element("span", { class: "label" }, "Body"), body),
    element("div", { class: "dialog-buttons" }, stop, send),
    status,
    output,
  );
}

/** @param {any} parameter */
function parameterField(parameter) {
  const input = element("input", { class: "input", required: parameter.required, name: parameter.name });
  const label = element("span", { class: "label" }, parameter.name);
  return {
    name: parameter.name,
    where: parameter.in,
    input,
    field: element("label", { class: "field" }, label, input),
  };
}

/** @param {string} path @param {{name: string, where: string, input: HTMLInputElement}[]} inputs */
function filled(path, inputs) {
  const query = new URLSearchParams();
  for (const { name, where, input } of inputs) {
    if (where === "path") path = path.replace(`{${name}}`, encodeURIComponent(input.value));
    else if (input.value) query.set(name, input.value);
  }
  return query.size ? `${path}?${query}` : path;
}

/** @param {Response} response @param {HTMLElement} output */
async function show(response, output) {
  if (response.headers.get("content-type")?.startsWith("application/json")) {
    output.textContent = JSON.stringify(await response.json(), null, 2);
    return;
  }
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  for (let length = 0; reader && length < LONGEST;) {
    const { done, value } = await reader.read();
    if (done) return;
    length += value.length;
    output.append(value);
  }
  output.append("\n… the rest is left out");
  await reader?.cancel();
}
