/**
 * The shapes of the JSON that the dashboard reads. Figures are null where the server does not know them; times are in
 * seconds since 1970, spans in seconds.
 *
 * @typedef {object} Model A model as in /v1/models.
 * @property {string} id
 * @property {"unloaded"|"loading"|"ready"|"unloading"|"failed"|"stopped"} state
 * @property {number|null} progress
 * @property {string|null} error
 * @property {string[]} aliases
 * @property {"thread"|"process"} isolation
 * @property {number|null} pid
 * @property {number|string|null} thread
 * @property {boolean} pinned
 * @property {number|null} memory_bytes
 * @property {number|null} prefix_cache_bytes
 * @property {number|null} reserved_bytes
 * @property {number|null} kv_bytes_per_token
 * @property {number} active
 * @property {number} waiting
 * @property {number|null} max_batch
 * @property {number|null} context_length
 * @property {number} restarts
 * @property {string[]} capabilities
 * @property {Speculation|null} [speculation]
 *
 * @typedef {object} Speculation
 * @property {string[]} drafters
 * @property {number} passes
 * @property {number} gain
 * @property {{drafter: string, proposed: number, accepted: number}[]} drafts
 *
 * @typedef {object} Status
 * @property {string} version
 * @property {number|null} uptime
 * @property {{budget_bytes: number|null, used_bytes: number|null}} memory
 * @property {{pid: number|null, rss_bytes: number|null}} process
 *
 * @typedef {(number|null)[]} Figures
 *
 * @typedef {object} HistoryAnswer Samples after the `since` of the request; every list is as long as `times`.
 * @property {number} interval
 * @property {number} now
 * @property {number[]} times
 * @property {Record<string, Record<string, Figures>>} models
 *
 * @typedef {object} Phase
 * @property {"prepare"|"queue"|"prefill"|"decode"} name
 * @property {number} start
 * @property {number|null} end Null while it lasts.
 *
 * @typedef {object} RequestRecord
 * @property {string} id
 * @property {string|null} model
 * @property {string|null} dialect
 * @property {string|null} endpoint
 * @property {"preparing"|"queued"|"prefill"|"decode"|"done"|"cancelled"|"failed"} state
 * @property {number} started
 * @property {Phase[]} phases
 * @property {number|null} first_token
 * @property {number|null} total
 * @property {number|null} prompt_tokens
 * @property {number|null} cached_tokens
 * @property {number|null} completion_tokens
 * @property {number} [drafted_tokens]
 * @property {number} [accepted_tokens]
 * @property {string|null} finish_reason
 * @property {string|null} error
 *
 * @typedef {{running: RequestRecord[], recent: RequestRecord[]}} Requests Newest first.
 */

/** States of requests that have not ended. */
export const RUNNING_STATES = ["preparing", "queued", "prefill", "decode"];

/**
 * Tells requests apart. Their ids do not: one HTTP request may ask a model several times, for example around tools.
 * @param {RequestRecord} request
 */
export function keyOf(request) {
  return `${request.id} ${request.started} ${request.model}`;
}
