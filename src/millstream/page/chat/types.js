/**
 * The shapes of what the chat keeps. This file has types only.
 *
 * @typedef {"image" | "audio"} FileKind
 * @typedef {{id: string, kind: FileKind, name: string, type: string}} Attachment  The file itself is in the store.
 * @typedef {{id: string, name: string, arguments: string}} ToolCall
 * @typedef {{prompt: number, completion: number, cached: number, reasoning: number}} Usage
 *
 * @typedef {object} Message
 * @property {string} id
 * @property {string} parent empty for a first message
 * @property {"user" | "assistant" | "tool"} role
 * @property {string} text
 * @property {number} created milliseconds
 * @property {Attachment[]} [attachments]
 * @property {string} [reasoning]
 * @property {ToolCall[]} [calls]
 * @property {string} [callId] of a tool's result
 * @property {string} [model]
 * @property {Usage} [usage]
 * @property {number} [firstToken] seconds
 * @property {number} [seconds] absent while it is written
 * @property {string} [finish] how it ended: stop, length, tool_calls, stopped, interrupted, failed
 * @property {string} [error]
 *
 * @typedef {object} Settings  An empty string leaves a value to the model's default.
 * @property {string} system
 * @property {Record<string, string>} sampling by the name of the parameter
 * @property {string} tools a JSON list of functions
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {boolean} renamed a person chose the title
 * @property {number} created
 * @property {number} updated
 * @property {string} model
 * @property {Settings} settings
 * @property {Record<string, Message>} messages a tree: each names its parent
 * @property {Record<string, string>} selected the chosen child by its parent
 *
 * @typedef {object} ModelInfo  Of GET /v1/models.
 * @property {string} id
 * @property {string} state
 * @property {number | null} progress
 * @property {string | null} [phase]
 * @property {string | null} error
 * @property {string[]} capabilities
 * @property {number | null} context_length
 */

export {};
