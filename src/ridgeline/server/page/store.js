// Conversations and settings, kept in this browser: an entry for each, so that two windows do not
// undo each other. It knows no page.

const PREFIX = 'ridgeline.conversation.';
const SETTINGS = 'ridgeline.settings';

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

const isMessage = (one) => typeof one?.content === 'string' && typeof one.role === 'string';

/** The newest first; each has id, title and messages of {role, content, ...}. */
export const conversations = Object.keys(localStorage)
  .filter((name) => name.startsWith(PREFIX))
  .sort()
  .reverse()
  .map((name) => ({ title: '', ...read(name), id: name.slice(PREFIX.length) }))
  .filter((one) => Array.isArray(one.messages) && one.messages.every(isMessage));

export const settings = { system: '', max_tokens: 1024, ...read(SETTINGS) };

export const saveSettings = () => write(SETTINGS, settings);

/** Write a conversation; returns whether the browser had room. */
export const save = (conversation) => write(PREFIX + conversation.id, conversation);

/** Add a conversation; it is not kept before it is saved. */
export function create() {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
  const conversation = { id, title: '', messages: [] };
  conversations.unshift(conversation);
  return conversation;
}

export function remove(conversation) {
  conversations.splice(conversations.indexOf(conversation), 1);
  localStorage.removeItem(PREFIX + conversation.id);
}
