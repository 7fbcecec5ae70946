// The engine as it runs: reads the server's views while the panel can be seen, and shows them.

import { call, events } from './api.js';
import { drawBlocks, drawLine, drawSteps, readBlocks } from './charts.js';
import { element } from './dom.js';

const SECONDS = 120; // that the small charts show at most; fewer at first
const MAX_STEPS = 400;
const at = (id) => document.getElementById(id);
const number = (value) => Math.round(value).toLocaleString('en');

const newSecond = () => ({ prompt: 0, generated: 0, ms: 0, steps: 0 });
let seconds = Array.from({ length: 30 }, newSecond); // the last is not over yet
let now = Math.floor(Date.now() / 1000);
let steps = [];
let view = null;
let reading = null; // an AbortController while connected

// --- taking views ----------------------------------------------------------------------------

function advance() {
  const time = Math.floor(Date.now() / 1000);
  for (let i = Math.max(now, time - SECONDS - 1); i < time; i += 1) seconds.push(newSecond());
  now = time;
  seconds = seconds.slice(-SECONDS - 1);
}

function take(next) {
  view = next;
  advance();
  const second = seconds.at(-1);
  for (const [ms, prompt, generated] of view.steps) {
    second.prompt += prompt;
    second.generated += generated;
    if (generated && !prompt) {
      second.ms += ms;
      second.steps += 1;
    }
  }
  steps = [...steps, ...view.steps].slice(-MAX_STEPS);
  show();
}

const canBeSeen = () => !document.hidden && at('live').offsetParent !== null;

/** Read views while somebody can see them; go on trying while the server is away. */
async function read() {
  if (reading || !canBeSeen()) return;
  reading = new AbortController();
  try {
    const response = await call('/v1/live', { signal: reading.signal });
    state('live', true);
    for await (const next of events(response)) take(next);
    state('disconnected', false);
  } catch (error) {
    if (error.name !== 'AbortError') state(error.message, false);
  }
  reading = null;
}

function state(text, isLive) {
  at('state').textContent = text;
  at('state').classList.toggle('on', isLive);
}

export function start() {
  const look = () => (canBeSeen() ? read() : reading?.abort());
  document.addEventListener('visibilitychange', look);
  addEventListener('resize', () => { look(); show(); });
  new MutationObserver(() => { look(); show(); }).observe(document.body, { attributeFilter: ['data-view'] });
  setInterval(() => { read(); advance(); if (canBeSeen()) showRates(); }, 1000);
  read();
}

// --- showing them ----------------------------------------------------------------------------

function show() {
  if (!view || !canBeSeen()) return;
  showRates();
  drawSteps(at('steps'), steps, at('steps-note'));
  const { counts, shown, total } = drawBlocks(at('blocks'), readBlocks(view.blocks));
  const held = counts.used + counts.shared;
  at('blocks-note').textContent = `${number(held)} of ${number(total)} blocks of ${view.block_size} tokens held`;
  at('blocks-legend').replaceChildren(...['shared', 'used', 'cached', 'free'].map((name) => (
    element('span', {}, element('i', { className: `is-${name}` }), `${name} ${number(counts[name])}`))));
  if (shown < total) at('blocks-legend').append(element('em', {}, `first ${number(shown)} shown, the rest is free`));
  at('sequences-note').textContent = `${number(view.num_running)} running, ${number(view.num_waiting)} waiting`;
  showSequences();
}

function showRates() {
  const last = (name) => (seconds.at(-2)[name] || seconds.at(-1)[name]);
  at('generated').textContent = number(last('generated'));
  at('prompt').textContent = number(last('prompt'));
  const gaps = seconds.map((second) => (second.steps ? second.ms / second.steps : null));
  const gap = gaps.findLast((value) => value !== null);
  at('latency').textContent = gap === undefined ? '–' : gap.toFixed(gap < 100 ? 1 : 0);
  drawLine(at('generated-chart'), seconds.slice(0, -1).map((second) => second.generated));
  drawLine(at('prompt-chart'), seconds.slice(0, -1).map((second) => second.prompt));
  drawLine(at('latency-chart'), gaps.slice(0, -1));
}

const rows = new Map();

function showSequences() {
  const named = new Set();
  for (const sequence of view.sequences) {
    const name = sequence.id.join('.');
    named.add(name);
    if (!rows.has(name)) rows.set(name, newRow(sequence));
    fill(rows.get(name), sequence);
    at('sequences').append(rows.get(name));
  }
  for (const [name, row] of rows) {
    if (!named.has(name)) {
      row.remove();
      rows.delete(name);
    }
  }
  at('quiet').hidden = named.size > 0;
}

function newRow({ id: [request, index] }) {
  const bar = (name) => element('td', {}, element('div', { className: `bar ${name}` }, element('i'), element('b')));
  return element('tr', {}, element('td', {}, index ? `${request}.${index}` : `${request}`), bar('of-prompt'), bar('of-answer'), element('td'), element('td'));
}

function fill(row, sequence) {
  const [, prompt, answer, tokens, blocks] = row.children;
  const percent = (part, whole) => `${(100 * part) / whole}%`;
  row.className = sequence.status;
  row.title = `${sequence.status}: ${sequence.computed_tokens} of ${sequence.prompt_tokens} prompt tokens computed`
    + ` (${sequence.cached_tokens} found cached), ${sequence.generated_tokens} of at most ${sequence.max_tokens} generated`;
  const [done, cached] = prompt.firstChild.children;
  done.style.width = percent(sequence.computed_tokens, sequence.prompt_tokens);
  cached.style.width = percent(sequence.computed_tokens && sequence.cached_tokens, sequence.prompt_tokens);
  answer.firstChild.firstChild.style.width = percent(sequence.generated_tokens, sequence.max_tokens);
  tokens.textContent = sequence.status === 'running'
    ? `${number(sequence.generated_tokens)} / ${number(sequence.max_tokens)}` : sequence.status;
  blocks.textContent = sequence.num_blocks || '';
}
