// Conversations and settings, kept in this browser: one entry for each conversation. Another tab may
// write the same entries, so each write merges with what is there. Knows nothing of the page.

import { hasNews, isKept, merge, newId, placed } from './conversation.js';

const PREFIX = 'ridgeline.conversation.';
const SETTINGS = 'ridgeline.settings';

/** Return a kept value; null if there is none, or if the browser blocks its storage. */
export function read(name, area = 'localStorage') {
  try {
    return JSON.parse(window[area].getItem(name));
  } catch {
    return null;
  }
}

/** Keep a value; return whether the browser allowed it and had room. */
export function write(name, value, area = 'localStorage') {
  try {
    window[area].setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function storedNames() {
  try {
    return Object.keys(window.localStorage);
  } catch { // cookies and site data are blocked
    return null;
  }
}

const isText = (value) => typeof value === 'string';
const areAttached = (list) => Array.isArray(list) && list.every((one) => isText(one?.name) && isText(one.text));
const isMessage = (one) => isText(one?.content) && isText(one.role)
  && areAttached(one.attachments ?? []) && Array.isArray(one.requests ?? []);

const fresh = (id) => {
  const { model, ...own } = settings;
  return { id, title: '', settings: own, sentFrom: null, changedAt: 0, messages: [] };
};

/** Return what was kept or exported as a conversation; null if it is none. */
export function toConversation(stored, id) {
  if (!Array.isArray(stored?.messages) || !stored.messages.every(isMessage)) return null;
  const messages = stored.messages.map(placed);
  const areUnique = new Set(messages.map((message) => message.id)).size === messages.length;
  return areUnique ? { ...fresh(id), ...stored, id, messages } : null;
}

const readConversation = (id) => toConversation(read(PREFIX + id), id);

/** Of the page: the model, and the settings that a new conversation begins with. */
export const settings = { system: '', ...read(SETTINGS) };

const names = storedNames();

export const isBlocked = names === null;

/** The newest first; conversation.js says what each has. */
export const conversations = (names ?? [])
  .filter((name) => name.startsWith(PREFIX))
  .map((name) => readConversation(name.slice(PREFIX.length)))
  .filter(Boolean);

const sort = () => conversations.sort((one, other) => (one.id < other.id ? 1 : -1));
sort();

export const saveSettings = () => write(SETTINGS, settings);

/** Add what other tabs wrote, then write; return whether that worked. */
export function save(conversation) {
  const stored = readConversation(conversation.id);
  if (stored) Object.assign(conversation, merge(conversation, stored));
  const messages = conversation.messages.filter(isKept);
  return write(PREFIX + conversation.id, { ...conversation, messages });
}

/** Add a conversation; it is not kept before it is saved. */
export function create() {
  const conversation = fresh(newId());
  conversations.unshift(conversation);
  return conversation;
}

/** Add conversations that were exported; what is here of the same ones stays. Return whether there was room. */
export function add(imported) {
  const isKept = imported.map((conversation) => {
    const hasRoom = save(conversation);
    adopt(conversation.id, conversation);
    return hasRoom;
  });
  return isKept.every(Boolean);
}

export function remove(conversation) {
  conversations.splice(conversations.indexOf(conversation), 1);
  if (!isBlocked) window.localStorage.removeItem(PREFIX + conversation.id);
}

/**
 * Call `changed` each time another tab has changed conversations or settings: with a conversation of
 * which that tab did not know all, as when both wrote at once, else with null.
 */
export function onOtherTab(changed) {
  addEventListener('storage', ({ key }) => {
    let unwritten = null;
    if (key === SETTINGS) Object.assign(settings, read(SETTINGS));
    else if (key?.startsWith(PREFIX)) unwritten = adopt(key.slice(PREFIX.length));
    else return;
    changed(unwritten);
  });
}

/** Take over what is stored of a conversation; return the one here if it has more, else null. */
function adopt(id, stored = readConversation(id)) {
  const own = conversations.find((conversation) => conversation.id === id);
  const isMore = Boolean(own && stored && hasNews(own, stored));
  if (own && stored) Object.assign(own, merge(own, stored));
  else if (own) conversations.splice(conversations.indexOf(own), 1);
  else if (stored) conversations.push(stored);
  sort();
  return isMore ? own : null;
}
