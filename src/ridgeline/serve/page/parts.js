// What an answer may have besides text: its reasoning, folded away, and calls of tools with a field
// for the result of each. It knows one message, and neither conversations nor the server.

import { element } from './dom.js';

/** Add a delta of the stream to a message. */
export function addDelta(message, delta) {
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? '') + delta.reasoning_content;
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    message.calls ??= [];
    message.calls[index] ??= { id, name: called.name, arguments: '' };
    message.calls[index].arguments += called.arguments ?? '';
  }
}

/** Show the reasoning of a message in `place`: open while nothing else is there, then folded. */
export function showReasoning(place, message, isGrowing) {
  if (!message.reasoning) {
    place.replaceChildren();
    return;
  }
  const isThinking = isGrowing && !message.content && !message.calls;
  let [details] = place.children;
  if (!details) {
    details = element('details', { className: 'reasoning' }, element('summary', {}, 'Reasoning'), element('div'));
    place.append(details);
  }
  if (details.isThinking !== isThinking) { // else it stays as the reader left it
    details.isThinking = isThinking;
    details.open = isThinking;
  }
  details.lastChild.textContent = message.reasoning;
}

/** Return JSON with line breaks, or the text as it is if it is none. */
export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch { // not complete
    return text;
  }
}

/** Show the calls of a message in `place`; `send` is called when results are to be sent, if they can be. */
export function showCalls(place, message, send) {
  const calls = message.calls ?? [];
  const shown = JSON.stringify([calls.map((call) => [call.name, call.arguments]), Boolean(send)]);
  if (place.shown === shown) return; // what is typed stays
  place.shown = shown;
  place.replaceChildren(...calls.map((call) => card(call, Boolean(send))));
  if (calls.length && send) {
    place.append(element('button', { type: 'button', className: 'action', onclick: send }, 'Send results'));
  }
}

function card(call, isOpen) {
  const made = element(
    'section',
    { className: 'call', 'aria-label': `Call of ${call.name}` },
    element('header', {}, 'calls ', element('code', {}, call.name)),
    element('pre', {}, element('code', {}, pretty(call.arguments))),
  );
  if (isOpen) {
    const field = element('textarea', { rows: 2, value: call.result ?? '', placeholder: 'What the function returns' });
    field.oninput = () => { call.result = field.value; };
    made.append(element('label', {}, 'Result', field));
  } else if (call.result) made.append(element('p', { className: 'result' }, call.result));
  return made;
}

/** Return what is wrong with the text of a field of the settings, or of a `list`, or nothing. */
export function problemOf(name, text) {
  if (!text.trim() || !['tools', 'schema', 'list'].includes(name)) return '';
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
  if (name === 'schema') {
    return value && typeof value === 'object' && !Array.isArray(value) ? '' : 'A JSON schema is an object.';
  }
  if (name === 'list') {
    const isList = Array.isArray(value) && value.every((one) => typeof one === 'string');
    return isList ? '' : 'This is a list of texts: ["one", "two"].';
  }
  const isTool = (one) => one?.type === 'function' && typeof one.function?.name === 'string';
  return Array.isArray(value) && value.every(isTool)
    ? '' : 'Tools are a list of {"type": "function", "function": {"name": …}}.';
}
