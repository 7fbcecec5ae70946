// Keys that do what buttons do, and the list of them.

import { element } from './dom.js';

const at = (id) => document.getElementById(id);
const isMac = /Mac|iPhone|iPad/.test(navigator.userAgent);
const isTyping = () => document.activeElement?.matches('input, textarea, select') ?? false;
const asText = (keys) => (isMac ? keys.replace('Ctrl', '⌘') : keys);

// Keys as a person reads them, what they do, and what does it, unless it is done elsewhere.
let table = [];

const parse = (keys) => {
  const parts = keys.split('+');
  return { key: parts.at(-1).toLowerCase(), isCtrl: parts.includes('Ctrl'), isShift: parts.includes('Shift') };
};

function fits(event, keys) {
  const { key, isCtrl, isShift } = parse(keys);
  if (key === '?') return event.key === '?' && !event.ctrlKey && !event.metaKey && !isTyping();
  return event.key.toLowerCase() === key && isShift === event.shiftKey && isCtrl === (event.ctrlKey || event.metaKey) && !event.altKey;
}

function press(event) {
  if (document.querySelector('dialog[open]')) return;
  const row = table.find(([keys, , act]) => act && fits(event, keys));
  if (!row) return;
  event.preventDefault();
  event.stopImmediatePropagation();
  row[2]();
}

/** `acts` has what the keys do: begin, search, drop, tune and fold. */
export function start({ begin, search, drop, tune, fold }) {
  table = [
    ['Enter', 'Send the message'],
    ['Shift+Enter', 'Begin a new line'],
    ['Escape', 'Stop the answer'],
    ['Shift+Escape', 'Go to the message field', () => at('question').focus()],
    ['Ctrl+Shift+O', 'New conversation', begin],
    ['Ctrl+K', 'Search conversations', search],
    ['Ctrl+Shift+Backspace', 'Delete this conversation', drop],
    ['Ctrl+,', 'Settings of this conversation', tune],
    ['Ctrl+B', 'Fold or unfold the engine panel', fold],
    ['?', 'This list, outside of text fields', show],
  ];
  at('shortcut-rows').replaceChildren(...table.map(([keys, words]) => element('tr', {},
    element('td', {}, words),
    element('td', {}, ...asText(keys).split('+').map((key) => element('kbd', {}, key))))));
  at('shortcuts').onclick = show;
  document.addEventListener('keydown', press, { capture: true });
}

const show = () => at('shortcut-dialog').showModal();
