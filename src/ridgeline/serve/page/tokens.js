// An answer token by token: how likely each was, and what else the model might have said. The server
// reads the answer again for it, which gives the same figures, so nothing is kept and no answer is slower.

import { readPrompt } from './api.js';
import { request } from './asking.js';
import { element } from './dom.js';

const NUM_ALTERNATIVES = 5;
const UNKNOWN = 'This answer can no longer be read token by token: the settings, or what was sent before it, have changed.';

/** Whether an answer can be read again as it was given. */
export const canRead = ({ content, usage, reasoning, calls, requests }) => Boolean(
  content && usage && !reasoning && !calls && requests?.length === 1);

/**
 * Return the tokens of an answer under a conversation's settings, each as {text, probability, others},
 * the others as {text, probability}, the likeliest first; and whether there are as many as the answer
 * was written in. Throws an Error that says what went wrong.
 */
export async function read(message, settings, before) {
  const { model, messages, tools, enable_thinking } = request(settings, [...before, message], true);
  const body = { model, messages, tools, enable_thinking, continue_final_message: true };
  const { ids, logprobs } = await readPrompt(body, NUM_ALTERNATIVES);
  const { prompt_tokens: start, completion_tokens: written } = message.usage;
  const read = ids.slice(start).map((id, i) => tokenOf(id, logprobs[start + i]));
  const isAsWritten = [written, written - 1].includes(read.length); // the last one may be the end of the turn
  return { tokens: aligned(read, message.content.trimEnd()), isAsWritten };
}

function tokenOf(id, entries) {
  const choice = ({ decoded_token: text, logprob }) => ({ text, probability: Math.exp(logprob) });
  const others = Object.values(entries).sort((one, other) => other.logprob - one.logprob).map(choice);
  return { ...choice(entries[id]), others: others.slice(0, NUM_ALTERNATIVES) };
}

/** Return the tokens with the text of the answer: bytes of a character that has several tokens show as �. */
function aligned(tokens, content) {
  let end = 0;
  const made = [];
  let parts = []; // of characters that are not complete
  for (const token of tokens) {
    if (token.text.includes('�')) {
      parts.push(token);
      continue;
    }
    const at = content.indexOf(token.text, end);
    if (at < 0 || (at > end && !parts.length)) throw new Error(UNKNOWN);
    made.push(...spread(parts, content.slice(end, at)), token);
    parts = [];
    end = at + token.text.length;
  }
  if (end < content.length && !parts.length) throw new Error(UNKNOWN);
  return [...made, ...spread(parts, content.slice(end))];
}

/** Give the characters to the first of the tokens that make them. */
const spread = (tokens, text) => tokens.map((token, i) => ({ ...token, text: i ? '' : text, isPart: true }));

const percent = (probability) => `${(100 * probability).toFixed(probability < 0.0995 ? 1 : 0)} %`;
const visible = (text) => (text.trim() ? text : text.replaceAll(' ', '␣')).replaceAll('\n', '↵').replaceAll('\t', '⇥') || '·';

/** Return an element that shows tokens, the less likely the darker, and the alternatives of one. */
export function viewOf({ tokens, isAsWritten }) {
  const table = element('table', { 'aria-label': 'What the model might have said here' });
  const panel = element('div', { className: 'alternatives', role: 'status' }, hint(tokens, isAsWritten), table);
  const shown = tokens.map((token, i) => {
    const one = element('span', { // not a button, whose text has no line breaks; one is in the order of tabs
      className: 'token', role: 'button', tabIndex: i ? -1 : 0, 'aria-label': `${visible(token.text)}, ${percent(token.probability)}`,
    }, token.text || '·');
    one.style.setProperty('--doubt', `${Math.round(100 * (1 - token.probability))}%`);
    one.onfocus = () => choose(one, token);
    one.onpointerenter = () => choose(one, token);
    return one;
  });
  const choose = (one, token) => {
    for (const other of shown) other.classList.toggle('chosen', other === one);
    table.replaceChildren(...rowsOf(token));
  };
  const text = element('div', { className: 'token-text' }, ...shown);
  text.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    shown[shown.indexOf(document.activeElement) + step]?.focus();
  };
  return element('div', { className: 'tokens' }, text, panel);
}

function hint(tokens, isAsWritten) {
  const doubts = tokens.filter(({ probability }) => probability < 0.5).length;
  const others = isAsWritten ? '' : ' The answer was written in other tokens, of the same text.';
  return element('p', { className: 'note' }, `${tokens.length} tokens, ${doubts} of them below 50 %.${others} `
    + 'The darker a token, the less likely it was. Point at one, or use the arrow keys, to see what else the model might have said.');
}

function rowsOf(token) {
  const chosen = token.others.some((other) => other.probability === token.probability) ? [] : [token];
  return [...token.others, ...chosen].map((other) => {
    const isChosen = other.probability === token.probability;
    const bar = element('i');
    bar.style.width = percent(other.probability).replace(' ', '');
    return element('tr', { className: isChosen ? 'chosen' : '' },
      element('td', {}, element('code', {}, visible(other.text))),
      element('td', {}, percent(other.probability)), element('td', {}, bar));
  });
}
