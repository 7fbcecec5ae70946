// The engine as it runs: reads the server's views while the panel can be seen, and shows them.

import { call, events } from './api.js';
import { drawBlocks, drawForeseen, drawLine, drawSteps, readBlocks } from './charts.js';
import { element } from './dom.js';
import * as ended from './explain.js';
import * as memory from './memory.js';
import * as servers from './servers.js';
import { settings } from './store.js';

const SECONDS = 120; // that the small charts show at most; fewer at first
const MAX_STEPS = 400;
const ENOUGH_STEPS = 200; // before the first of them nobody can say how far off the forecast is
const BUSY_MS = 5000; // without a view, after which one is asked for: a busy server sends four a second
const IDLE_MS = 30_000; // an idle one sends none
const ANSWER_MS = 5000; // for a view that was asked for
const at = (id) => document.getElementById(id);
const number = (value) => Math.round(value).toLocaleString('en');

const newSecond = () => ({ prompt: 0, generated: 0, ms: 0, steps: 0 });
let seconds = Array.from({ length: 30 }, newSecond); // the last is not over yet
let now = Math.floor(Date.now() / 1000);
let steps = [];
let view = null;
let reading = null; // an AbortController while connected
let seenAt = null; // when the last view came, or the wait for one began; null while nobody looks
let askedAt = 0;
let isAsleep = false; // a model that loads with its first question has nothing to show before

// --- taking views ----------------------------------------------------------------------------

function advance() {
  const time = Math.floor(Date.now() / 1000);
  for (let i = Math.max(now, time - SECONDS - 1); i < time; i += 1) seconds.push(newSecond());
  now = time;
  seconds = seconds.slice(-SECONDS - 1);
}

function take(next) {
  view = next;
  seenAt = askedAt = Date.now();
  state('live', 'live');
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
  if (reading || isAsleep || !canBeSeen()) return;
  reading = new AbortController();
  askedAt = Date.now();
  seenAt ??= askedAt;
  try {
    const asked = settings.model ? `?model=${encodeURIComponent(settings.model)}` : '';
    const response = await call(`v1/live${asked}`, { signal: reading.signal });
    for await (const next of events(response)) take(next);
    forget('disconnected');
  } catch (error) {
    isAsleep = error.code === 'model_not_loaded';
    if (isAsleep) forget('loads with its first question', 'asleep');
    else if (error.name !== 'AbortError') forget(error.message);
  }
  reading = null;
}

/** Look again: an answer begins, so the model is loaded. */
export function wake() {
  isAsleep = false;
}

/** Show no view rather than an old one: whatever ran there is gone. */
function forget(why, kind = 'away') {
  view = seenAt = null;
  steps = [];
  ended.forget();
  state(why, kind);
}

/** Ask for a view when none has come for long, and say so when none comes then. */
function watch() {
  const patience_ms = view && !view.num_running && !view.num_waiting ? IDLE_MS : BUSY_MS;
  if (reading && Date.now() - askedAt > patience_ms) reading.abort();
  const isSilent = reading && Date.now() - seenAt > patience_ms + ANSWER_MS;
  if (isSilent) state('the server does not answer', view ? 'stale' : 'away');
}

function state(text, kind) {
  at('state').textContent = text;
  at('live').dataset.state = kind;
}

function look() {
  if (canBeSeen()) read();
  else {
    reading?.abort();
    seenAt = null;
  }
}

/** Look at another model. */
export function restart() {
  reading?.abort();
  wake();
  forget('connecting');
  memory.restart();
}

function tick() {
  advance();
  if (!canBeSeen()) return;
  read();
  watch();
  if (view) memory.look();
  servers.look();
  showRates();
}

export function start() {
  document.addEventListener('visibilitychange', look);
  addEventListener('resize', () => { look(); show(); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', show);
  new MutationObserver(() => { look(); show(); }).observe(document.body, { attributeFilter: ['data-view', 'data-panel'] });
  setInterval(tick, 1000);
  read();
}

// --- showing them ----------------------------------------------------------------------------

function show() {
  if (!view || !canBeSeen()) return;
  showRates();
  drawSteps(at('steps'), steps, at('steps-note'));
  showForeseen();
  const { counts, shown, total } = drawBlocks(at('blocks'), readBlocks(view.blocks));
  const held = counts.used + counts.shared;
  at('blocks-note').textContent = `${number(held)} of ${number(total)} blocks of ${view.block_size} tokens held`;
  at('blocks-legend').replaceChildren(...['shared', 'used', 'cached', 'free'].map((name) => (
    element('span', {}, element('i', { className: `is-${name}` }), `${name} ${number(counts[name])}`))));
  if (shown < total) at('blocks-legend').append(element('em', {}, `first ${number(shown)} shown, the rest is free`));
  at('sequences-note').textContent = `${number(view.num_running)} running, ${number(view.num_waiting)} waiting`;
  showSequences();
}

function showForeseen() {
  drawForeseen(at('foreseen'), steps);
  const known = steps.filter((step) => step[3]);
  const sum = (index) => known.reduce((total, step) => total + step[index], 0);
  if (known.length < ENOUGH_STEPS) {
    at('foreseen-note').textContent = `learning: ${known.length} of ${ENOUGH_STEPS} steps`;
    return;
  }
  const off = `off by ${(100 * Math.abs(sum(3) / sum(0) - 1)).toFixed(0)} %`;
  at('foreseen-note').textContent = off + (view.is_calibrated ? `, speed ${view.speed.toFixed(2)}` : ', uncalibrated');
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
  ended.follow([...named]);
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
