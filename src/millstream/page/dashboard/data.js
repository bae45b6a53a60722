/** What the dashboard asks the server for. */

import { apiJson } from "../common/api.js";

/** @typedef {import("./contract.js").Model} Model */
/** @typedef {import("./contract.js").Status} Status */
/** @typedef {import("./contract.js").Requests} Requests */
/** @typedef {import("./history.js").History} History */

/** Requests that have ended and are still listed. */
export const LISTED = 100;

/**
 * @typedef {object} Snapshot
 * @property {Model[]} models
 * @property {Status} status
 * @property {Requests} requests
 */

/**
 * Everything that is shown, once. New samples go into `history`; they are asked for only when there can be one.
 * @param {History} history
 * @returns {Promise<Snapshot>}
 */
export async function snapshot(history) {
  const [models, status, requests] = await Promise.all([
    apiJson("/v1/models"),
    apiJson("/server/status"),
    apiJson(`/server/requests?limit=${LISTED}`),
    readHistory(history),
  ]);
  return { models: models.data, status, requests };
}

/** @param {History} history */
async function readHistory(history) {
  if (history.isCurrent()) return;
  history.add(await apiJson(`/server/history?since=${history.last}`));
}

/**
 * Loading answers when the model is loaded, which can take minutes.
 * @param {string} model
 * @param {"load"|"unload"} action
 */
export async function changeModel(model, action) {
  const path = model.split("/").map(encodeURIComponent).join("/");
  await apiJson(`/v1/models/${path}/${action}`, { method: "POST", ask: true });
}
