/** Requests to the server: adds the API key, asks for it where one is needed, and puts errors into words. */

import { askForKey, storedKey } from "./key.js";

/** The address that the server is reached at, also behind a proxy that adds a path. */
const ROOT = new URL("../../", import.meta.url);

/** True after a person closed the key dialog: requests of a poll must not open it again and again. */
let declined = false;

addEventListener("millstream:key", () => (declined = false));

/** An error of the server or of the way to it. Its message can be shown to a person. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {number} status 0 if there was no answer
   * @param {string} [code]
   */
  constructor(message, status, code = "") {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

/**
 * @typedef {RequestInit & {json?: unknown, ask?: boolean}} ApiOptions `json` is sent as the body of a POST;
 *   `ask: true` opens the key dialog even if it was closed before, `ask: false` never does.
 */

/**
 * Sends a request and returns the response if its status is a success. Throws `ApiError` otherwise; an `AbortError`
 * passes through.
 * @param {string} path such as "/v1/models"
 * @param {ApiOptions} [options]
 * @returns {Promise<Response>}
 */
export async function api(path, options = {}) {
  for (;;) {
    const key = storedKey();
    const response = await send(path, options, key);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401 || !mayAsk(options.ask)) throw error;
    if (key !== storedKey()) continue; // another request has asked meanwhile
    if (!(await askForKey(key ? "This key is not valid. Check it and try again." : ""))) {
      declined = true;
      throw error;
    }
  }
}

/**
 * Sends a request and returns the JSON of the response.
 * @param {string} path
 * @param {ApiOptions} [options]
 * @returns {Promise<any>}
 */
export async function apiJson(path, options = {}) {
  return (await api(path, options)).json();
}

/** @param {boolean | undefined} ask */
function mayAsk(ask) {
  return ask === true || (ask !== false && !declined);
}

/**
 * @param {string} path
 * @param {ApiOptions} options
 * @param {string} key
 */
async function send(path, { json, ask: _, ...options }, key) {
  const headers = new Headers(options.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  if (json !== undefined) {
    headers.set("Content-Type", "application/json");
    options = { method: "POST", body: JSON.stringify(json), ...options };
  }
  try {
    return await fetch(new URL(path.replace(/^\/+/, ""), ROOT), { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Check that it is still running.", 0, "unreachable");
  }
}

/** @param {Response} response */
async function errorOf(response) {
  let message = `The server answered with status ${response.status}.`;
  let code = "";
  try {
    const body = await response.json();
    message = body.error?.message ?? (typeof body.error === "string" ? body.error : message);
    code = body.error?.code ?? "";
  } catch {
    // No JSON: an error of a proxy in between. The status says what is known.
  }
  return new ApiError(message, response.status, code);
}
