// Conversations as data: a tree of messages, what of it is sent to the model, and how two copies merge.
// Pure: knows nothing of the page, the browser's storage or the server.
//
// A conversation has id, title, settings, sentFrom (the id of the first message that is sent, null for
// all), changedAt and messages. A message has id, parent (the id of the message it follows, null for
// the first), changedAt, role and content. Messages of one role with one parent are versions of one
// another: a question that was edited, an answer that was given again. A version has chosenAt. An
// answer may also have reasoning, calls of tools (id, name, arguments, result), isJson, and how it
// ended: usage, timings, reason, error, isTooLong, isFull (the context is), capped and ignored (what
// the server said of that), and requests (id and model of each that gave a part of it). A question may
// have attachments (name, text). Times are in milliseconds.

export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;

export function newMessage(role, content, parent, extra = {}) {
  return { id: newId(), parent, changedAt: Date.now(), role, content, ...extra };
}

const key = (parent, role) => `${role} ${parent}`;

/** The same for all versions of a message. */
export const keyOf = (message) => key(message.parent, message.role);

/** Return all versions of a message, the oldest first. */
export const versionsOf = (conversation, message) => (
  conversation.messages.filter((one) => keyOf(one) === keyOf(message)));

/** Return the messages to show, the first one first: of versions the one chosen last. */
export function shownMessages(conversation) {
  const chosen = new Map();
  for (const message of conversation.messages) {
    const other = chosen.get(keyOf(message));
    if (!other || (message.chosenAt ?? 0) >= (other.chosenAt ?? 0)) chosen.set(keyOf(message), message);
  }
  const after = (parent, ...roles) => roles.map((role) => chosen.get(key(parent, role))).find(Boolean);
  const shown = [];
  let message = after(null, 'user', 'assistant');
  while (message) {
    shown.push(message);
    const isQuestion = message.role === 'user';
    // Another tab may have asked more before this answer began: that question follows the answer.
    message = isQuestion ? after(message.id, 'assistant', 'user')
      : after(message.id, 'user', 'assistant') ?? after(message.parent, 'user');
  }
  return shown;
}

/** Return the id of the message that the next one follows. */
export const endOf = (conversation) => shownMessages(conversation).at(-1)?.id ?? null;

/** Return a message with its place in the tree; one without follows the message before it in the list. */
export const placed = (message, i, messages) => (
  { id: String(i), parent: i ? messages[i - 1].id ?? String(i - 1) : null, changedAt: 0, ...message });

/** Return the messages to send up to `end`, a message or null for all: those shown, without the ones that were left out or are empty. */
export function sentMessages(conversation, end = null) {
  const all = shownMessages(conversation);
  const shown = end ? all.slice(0, all.findIndex((message) => keyOf(message) === keyOf(end))) : all;
  const first = shown.findIndex((message) => message.id === conversation.sentFrom);
  return shown.slice(Math.max(first, 0)).filter((message) => message.content || message.calls || message.attachments);
}

/** Whether an answer can go on: it has text, and neither ended by itself nor is the context full. */
export const canGoOn = (message) => Boolean(
  message.content && !message.calls && !message.isJson && !message.isFull && !['stop', 'tool_calls'].includes(message.reason));

/** Return the tokens of an answer that went on: those of both requests, but its beginning once. */
export const joinedUsage = (begun, more) => (begun && more
  ? { ...begun, completion_tokens: begun.completion_tokens + more.completion_tokens } : more);

const piecesOf = ({ content, reasoning, attachments }) => [
  content, reasoning ?? '', ...(attachments ?? []).flatMap(({ name, text }) => [name, text])];

/** Return {message, before, found, after}: where words stand in a conversation; null if nowhere. */
export function find(conversation, words) {
  const wanted = words.toLowerCase();
  const pieces = shownMessages(conversation).flatMap((message) => piecesOf(message).map((text) => ({ message, text })));
  for (const { message, text } of [...pieces, { message: null, text: conversation.title }]) {
    const at = text.toLowerCase().indexOf(wanted);
    if (at < 0) continue;
    const end = at + words.length;
    return { message, before: text.slice(Math.max(0, at - 24), at), found: text.slice(at, end), after: text.slice(end, end + 60) };
  }
  return null;
}

/** Return a message as the API has it: several, if tools were called. */
export function toApi({ role, content, reasoning, calls, attachments }) {
  const said = { role, content };
  if (attachments) {
    const parts = attachments.map(({ name, text }) => `File “${name}”:\n\n${text}\n`);
    said.content = [...parts, content].map((text) => ({ type: 'text', text }));
  }
  if (reasoning) said.reasoning_content = reasoning;
  if (!calls) return [said];
  said.content = content || null;
  said.tool_calls = calls.map((call) => (
    { id: call.id, type: 'function', function: { name: call.name, arguments: call.arguments } }));
  return [said, ...calls.map((call) => ({ role: 'tool', tool_call_id: call.id, content: call.result ?? '' }))];
}

const questionsOf = (messages) => messages.filter((message) => message.role === 'user');

export const canLeaveOut = (conversation) => questionsOf(sentMessages(conversation)).length > 1;

/** Send no more than the newer half of what is sent now, but always the last question. */
export function leaveOutOldest(conversation) {
  const sent = sentMessages(conversation);
  const lengthOf = (message) => piecesOf(message).reduce((sum, text) => sum + text.length, 0);
  const lengthFrom = (i) => sent.slice(i).reduce((sum, message) => sum + lengthOf(message), 0);
  const later = questionsOf(sent).slice(1);
  const first = later.find((question) => lengthFrom(sent.indexOf(question)) <= lengthFrom(0) / 2) ?? later.at(-1);
  Object.assign(conversation, { sentFrom: first.id, changedAt: Date.now() });
}

/** Whether a message is kept: one that has not begun is none. */
export const isKept = (one) => Boolean(one.content || one.attachments || one.calls || one.reason || one.error);

/** Whether a copy of a conversation has anything that is newer than in another one, or not there. */
export function hasNews(own, stored) {
  const storedById = new Map(stored.messages.map((message) => [message.id, message]));
  return own.changedAt > stored.changedAt || own.messages.filter(isKept).some((message) => {
    const other = storedById.get(message.id);
    return !other || message.changedAt > other.changedAt || (message.chosenAt ?? 0) > (other.chosenAt ?? 0);
  });
}

/** Return one conversation with the messages of two copies of it: of each message the newer copy. */
export function merge(own, stored) {
  const ownById = new Map(own.messages.map((message) => [message.id, message]));
  const messages = stored.messages.map((message) => {
    const other = ownById.get(message.id);
    if (!other) return message;
    const newer = other.changedAt >= message.changedAt ? other : message;
    const chosenAt = Math.max(message.chosenAt ?? 0, other.chosenAt ?? 0); // any tab may choose
    return chosenAt ? Object.assign(newer, { chosenAt }) : newer;
  });
  const names = new Set(stored.messages.map((message) => message.id));
  messages.push(...own.messages.filter((message) => !names.has(message.id)));
  return { ...(own.changedAt >= stored.changedAt ? own : stored), messages };
}
