/** The dialog with the settings of a chat: system prompt, sampling, reasoning, tools. */

import { openDialog } from "../common/dialogs.js";
import { element } from "../common/dom.js";
import { defaultSettings, EFFORTS, SAMPLING } from "./request.js";

/** @typedef {import("./types.js").Settings} Settings */

const FIRST = 4;
const LAST_USED = "millstream.settings";

/** @returns {Settings} those of the last chat, for a new one */
export function lastSettings() {
  try {
    return { ...defaultSettings(), ...JSON.parse(localStorage.getItem(LAST_USED) ?? "{}") };
  } catch {
    return defaultSettings(); // storage is blocked, or holds something else
  }
}

/** @param {Settings} settings */
function rememberSettings(settings) {
  try {
    localStorage.setItem(LAST_USED, JSON.stringify(settings));
  } catch {
    // Storage is blocked: the next chat starts with the defaults.
  }
}

/**
 * @param {Settings} settings
 * @param {{thinks: boolean}} model whether it reasons before it answers
 * @returns {Promise<Settings | null>} null if the dialog was dismissed
 */
export async function editSettings(settings, { thinks }) {
  const system = element("textarea", {
    class: "input",
    rows: "4",
    value: settings.system,
    placeholder: "For example: Answer briefly and name your sources.",
  });
  const numbers = SAMPLING.map((parameter) => numberField(parameter, settings.sampling[parameter.name] ?? ""));
  const effort = effortField(settings.sampling.reasoning_effort ?? "");
  const tools = toolsField(settings.tools);
  const chosen = await openDialog(
    "Settings of this chat",
    [
      field("System prompt", system, "How the model should behave. It is sent before the messages."),
      element("div", { class: "field-grid" }, ...numbers.slice(0, FIRST).map((each) => each.field)),
      thinks && field("Reasoning effort", effort, "How much the model thinks before it answers."),
      element(
        "details",
        {},
        element("summary", {}, "More"),
        element("div", { class: "field-grid" }, ...numbers.slice(FIRST).map((each) => each.field)),
        field("Tools", tools, "A JSON list of functions, as in OpenAI's API. You give the results yourself."),
      ),
      element("p", { class: "muted hint" }, "An empty field leaves the value to the model."),
    ],
    [
      { value: "reset", label: "Reset", class: "button" },
      { value: "ok", label: "Save" },
    ],
  );
  if (!chosen) return null;
  const sampling = Object.fromEntries(numbers.map(({ name, input }) => [name, input.value.trim()]));
  const made =
    chosen === "reset"
      ? defaultSettings()
      : { system: system.value, sampling: { ...sampling, reasoning_effort: effort.value }, tools: tools.value };
  rememberSettings(made);
  return made;
}

/** @param {string} label @param {HTMLElement} control @param {string} hint */
function field(label, control, hint) {
  return element(
    "label",
    { class: "field" },
    element("span", { class: "label" }, label),
    control,
    element("span", { class: "hint" }, hint),
  );
}

/** @param {typeof SAMPLING[number]} parameter @param {string} value */
function numberField({ name, label, min, max, step, hint }, value) {
  // With "any", every number within the bounds is valid; the arrows move by one.
  const input = element("input", {
    class: "input",
    type: "number",
    min,
    max,
    step: step < 1 ? "any" : step,
    value,
    inputmode: "decimal",
    name,
  });
  return { name, input, field: field(label, input, hint) };
}

/** @param {string} value */
function effortField(value) {
  const options = [["", "The model's default"], ...EFFORTS.map((effort) => [effort, effort])];
  return element(
    "select",
    { class: "input" },
    ...options.map(([id, label]) => element("option", { value: id, selected: id === value }, label)),
  );
}

/** @param {string} value */
function toolsField(value) {
  const input = element("textarea", { class: "input mono", rows: "4", value, spellcheck: "false" });
  input.addEventListener("input", () => input.setCustomValidity(problemOf(input.value)));
  return input;
}

/** @param {string} text @returns {string} */
function problemOf(text) {
  if (!text.trim()) return "";
  try {
    return Array.isArray(JSON.parse(text)) ? "" : "This must be a JSON list: [ … ].";
  } catch (error) {
    return `This is not JSON: ${error instanceof Error ? error.message : error}`;
  }
}
