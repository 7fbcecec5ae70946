// Conversations as data: versions of an answer, what is sent to the model, and how two copies merge.
// Pure: knows nothing of the page, the browser's storage or the server.
//
// A conversation has id, title, sentFrom (the id of the first message that is sent, null for all),
// changedAt and messages. A message has id, changedAt, role and content; an answer may also have
// versionOf (the id of the first answer to the same question) and chosenAt, reasoning, calls of tools
// (id, name, arguments, result), isJson, and how it ended: usage, timings, reason, error, isTooLong.
// Times are in milliseconds.

export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;

export function newMessage(role, content, more = {}) {
  return { id: newId(), changedAt: Date.now(), role, content, ...more };
}

/** The same for all versions of an answer. */
export const keyOf = (message) => message.versionOf ?? message.id;

/** Return all versions of a message, the oldest first. */
export const versionsOf = (conversation, message) => (
  conversation.messages.filter((one) => keyOf(one) === keyOf(message)));

/** Return the messages to show: of an answer's versions the one chosen last. */
export function shownMessages(conversation) {
  const shown = new Map();
  for (const message of conversation.messages) {
    const other = shown.get(keyOf(message));
    if (!other || (message.chosenAt ?? 0) >= (other.chosenAt ?? 0)) shown.set(keyOf(message), message);
  }
  return [...shown.values()];
}

/** Return the messages to send: those shown, without the ones that were left out or are empty. */
export function sentMessages(conversation) {
  const shown = shownMessages(conversation);
  const first = shown.findIndex((message) => message.id === conversation.sentFrom);
  return shown.slice(Math.max(first, 0)).filter((message) => message.content || message.calls);
}

/** Return a message as the API has it: several, if tools were called. */
export function toApi({ role, content, reasoning, calls }) {
  const said = { role, content };
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
  const lengthFrom = (i) => sent.slice(i).reduce((sum, message) => sum + message.content.length, 0);
  const later = questionsOf(sent).slice(1);
  const first = later.find((question) => lengthFrom(sent.indexOf(question)) <= lengthFrom(0) / 2) ?? later.at(-1);
  Object.assign(conversation, { sentFrom: first.id, changedAt: Date.now() });
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
  const placeOf = (id) => messages.findIndex((message) => message.id === id);
  own.messages.forEach((message, i) => {
    if (placeOf(message.id) >= 0) return;
    // An answer stays behind its question; a new question goes to the end.
    const before = message.role === 'assistant' ? placeOf(own.messages[i - 1]?.id) : -1;
    messages.splice(before < 0 ? messages.length : before + 1, 0, message);
  });
  return { ...(own.changedAt >= stored.changedAt ? own : stored), messages };
}
