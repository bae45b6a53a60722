/** Conversations and their files, in this browser's IndexedDB. */

/** @typedef {import("./types.js").Conversation} Conversation */

const NAME = "millstream";
const VERSION = 1;

/** @type {Promise<IDBDatabase> | null} */
let opening = null;

/** @returns {Promise<IDBDatabase>} */
function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("files");
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab holds an older version"));
  });
  return opening;
}

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** @param {"conversations" | "files"} name @param {IDBTransactionMode} mode */
async function store(name, mode) {
  return (await database()).transaction(name, mode).objectStore(name);
}

/** @returns {Promise<Conversation[]>} the newest first */
export async function listConversations() {
  const all = await done(
    /** @type {IDBRequest<Conversation[]>} */ ((await store("conversations", "readonly")).getAll()),
  );
  return all.sort((one, other) => other.updated - one.updated);
}

/** @param {string} id @returns {Promise<Conversation | undefined>} */
export async function readConversation(id) {
  return done((await store("conversations", "readonly")).get(id));
}

/**
 * Saves a conversation. Messages that another tab added meanwhile stay.
 * @param {Conversation} conversation
 */
export async function saveConversation(conversation) {
  const conversations = await store("conversations", "readwrite");
  /** @type {Conversation | undefined} */
  const known = await done(conversations.get(conversation.id));
  const messages = { ...known?.messages, ...conversation.messages };
  await done(conversations.put({ ...conversation, messages }));
}

/** Deletes a conversation with its files. @param {Conversation} conversation */
export async function deleteConversation(conversation) {
  const files = Object.values(conversation.messages).flatMap((message) => message.attachments ?? []);
  const transaction = (await database()).transaction(["conversations", "files"], "readwrite");
  for (const file of files) transaction.objectStore("files").delete(file.id);
  await done(transaction.objectStore("conversations").delete(conversation.id));
}

/** @param {string} id @param {Blob} file */
export async function saveFile(id, file) {
  await done((await store("files", "readwrite")).put(file, id));
}

/** @param {string} id @returns {Promise<Blob | undefined>} */
export async function readFile(id) {
  return done((await store("files", "readonly")).get(id));
}
