// What takes the process's memory: a bar, its parts, and on demand every line. Asks for it every few
// seconds while somebody looks; adds up and names, and measures nothing.

import { call } from './api.js';
import { decimalSize, element } from './dom.js';
import { settings } from './store.js';

const PERIOD_MS = 5000;
// The parts of the bar in order, with how a line's name begins; what begins otherwise is the last.
const PARTS = [
  ['weights', 'weights'], ['KV cache', 'kv_cache'], ['scratch', 'scratch'], ['draft model', 'draft_model'],
  ['kernels', 'kernels'], ['text', 'text'], ['before the model', 'process.before'], ['other', ''],
];
const at = (id) => document.getElementById(id);
const size = (bytes) => (bytes < 99.5e6 ? `${(bytes / 1e6).toFixed(1)} MB` : decimalSize(bytes));

let askedAt = 0;

/** Ask for it, if the last time is long ago. */
export async function look() {
  if (Date.now() - askedAt < PERIOD_MS) return;
  askedAt = Date.now();
  try {
    const asked = settings.model ? `?model=${encodeURIComponent(settings.model)}` : '';
    show(await (await call(`v1/memory${asked}`)).json());
  } catch { // the panel says that the server is away
    at('memory').hidden = true;
  }
}

/** Ask anew at once: it is another process. */
export function restart() {
  askedAt = 0;
  at('memory').hidden = true;
}

const partOf = (name) => PARTS.find(([, begin]) => `${name}.`.startsWith(begin ? `${begin}.` : ''))[0];

function show({ resident_bytes: total, lines, notes, needs }) {
  const sums = new Map(PARTS.map(([name]) => [name, 0]));
  for (const line of lines) sums.set(partOf(line.name), sums.get(partOf(line.name)) + line.resident_bytes);
  const parts = [...sums].filter(([, bytes]) => bytes > 0);
  at('memory').hidden = false;
  const needed = needs ? `, needs ${decimalSize(needs.bytes)} for a text of ${needs.context_tokens.toLocaleString('en')} tokens` : '';
  at('memory-note').textContent = `${size(total)} in use${needed}`;
  const bar = at('memory-bar');
  bar.setAttribute('aria-label', parts.map(([name, bytes]) => `${name} ${size(bytes)}`).join(', '));
  bar.replaceChildren(...parts.map(([name, bytes]) => {
    const piece = element('i', { className: mark(name), title: `${name} ${size(bytes)}` });
    piece.style.flexGrow = bytes;
    return piece;
  }));
  at('memory-legend').replaceChildren(...parts.map(([name, bytes]) => (
    element('span', {}, element('i', { className: mark(name) }), `${name} ${size(bytes)}`))));
  at('memory-lines').replaceChildren(...lines.map(row));
  at('memory-notes').replaceChildren(...notes.map((note) => element('p', {}, note)));
}

const mark = (name) => `part-${PARTS.findIndex(([one]) => one === name)}`;

function row({ name, bytes, resident_bytes: resident, how, mapped }) {
  const isRest = name.startsWith('process.');
  const title = mapped ? `${how}; mapped from a file` : how;
  return element('tr', { title }, element('td', {}, name.replace('kv_', 'KV ').replaceAll('.', ' · ').replaceAll('_', ' ')),
    element('td', {}, isRest ? '' : size(bytes)), element('td', {}, size(resident)));
}
