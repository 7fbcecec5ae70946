// Conversations and settings, kept in this browser. It knows no page.

const CONVERSATIONS = 'ridgeline.conversations';
const SETTINGS = 'ridgeline.settings';

function read(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

const isConversation = (one) => one && typeof one.id === 'string' && Array.isArray(one.messages);
const found = read(CONVERSATIONS, []);

/** The newest first; each has id, title and messages of {role, content, ...}. */
export const conversations = Array.isArray(found) ? found.filter(isConversation) : [];
export const settings = { system: '', max_tokens: 1024, ...read(SETTINGS, {}) };

/** Write everything; returns whether the browser had room. */
export function save() {
  try {
    localStorage.setItem(CONVERSATIONS, JSON.stringify(conversations));
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
    return true;
  } catch {
    return false;
  }
}

export function create() {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
  const conversation = { id, title: '', messages: [] };
  conversations.unshift(conversation);
  return conversation;
}

export function remove(conversation) {
  conversations.splice(conversations.indexOf(conversation), 1);
  save();
}
