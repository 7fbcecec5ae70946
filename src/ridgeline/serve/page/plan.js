// The page of plans: a form whose state is in the address, and one request for each change. It
// computes nothing: what is shown comes from the server (plan_result.js shows it).

import { call } from './api.js';
import { element } from './dom.js';
import { showChoices } from './plan_choices.js';
import { showPlan } from './plan_result.js';

const WAIT_MS = 150; // after the last key
const LONGEST = 32_000; // characters of a config that an address may hold
const AGAIN_MS = 700; // when another's plan for a load is being made
const NUMBERS = ['context', 'concurrency', 'max_num_batched_tokens', 'block_size', 'gpu_memory_utilization', 'request_rate', 'max_concurrency'];
const LOAD = ['buy', 'prompt_tokens', 'new_tokens', 'request_rate', 'max_concurrency', 'ttft_ms', 'tpot_ms'];
const PERCENTILES = ['p95', 'p50', 'p90', 'p99', 'mean'];
const at = (id) => document.getElementById(id);
const form = at('form');

let waiting = null;
let shown = ''; // the state that was asked for last, as text
let asking = null; // an AbortController while a request is under way
let computed = () => {}; // ends what says so

// --- the form ----------------------------------------------------------------------------------

const gibOf = (bytes) => `${(bytes / 2 ** 30).toFixed(bytes < 2 ** 33 ? 1 : 0)} GiB`;

function fillChoices({ models, devices, dtypes, kv_cache_dtypes: caches, engines }) {
  const choose = (name, options, first) => form.elements[name].replaceChildren(new Option(first, ''), ...options.map((one) => new Option(one, one)));
  choose('dtype', dtypes, "model's");
  choose('kv_cache_dtype', caches, "engine's");
  choose('engine', engines, 'fitting');
  for (const name of ['ttft_at', 'tpot_at']) choose(name, PERCENTILES.slice(1), PERCENTILES[0]);
  form.elements.model.replaceChildren(...models.map((name) => new Option(name, name)), new Option('a config.json', ''));
  at('model-field').hidden = models.length === 0;
  const named = (device) => new Option(`${device.id}  –  ${device.name}, ${gibOf(device.usable_bytes)}`, device.id);
  const parents = [...new Set(devices.map((one) => one.parent).filter(Boolean))];
  form.elements.on.replaceChildren(
    new Option('all  –  every device that can be rented', 'all'),
    new Option('shop  –  every device that can be bought', 'shop'),
    ...devices.filter((one) => !one.parent).map(named),
    ...parents.map((parent) => (
      element('optgroup', { label: `slices of ${parent}` }, ...devices.filter((one) => one.parent === parent).map(named)))),
  );
}

/** Return what the form says, without what is left open. */
function readForm() {
  const values = {};
  for (const field of form.elements) {
    if (!field.name) continue;
    const value = field.multiple ? [...field.selectedOptions].map((one) => one.value).join(',') : field.value.trim();
    if (value) values[field.name] = value;
  }
  if (values.model) delete values.config;
  return values;
}

/** Return the body of a request. Throws an Error in words for a config that is no JSON object. */
function bodyOf({ config, together, ttft_ms: ttft, ttft_at: ttftAt, tpot_ms: tpot, tpot_at: tpotAt, ...wishes }) {
  const body = { ...wishes, compare_published: true };
  if (together && body.on) body.on = body.on.replaceAll(',', together);
  const bounds = [['ttft', ttftAt, ttft], ['tpot', tpotAt, tpot]].filter((one) => one[2]);
  if (bounds.length > 0) body.slo = bounds.map(([metric, percentile, ms]) => `${metric}:${percentile ?? PERCENTILES[0]}:${ms}`);
  for (const name of NUMBERS) if (body[name] && !Number.isNaN(Number(body[name]))) body[name] = Number(body[name]);
  if (body.buy) body.buy = true;
  if (body.model) return body;
  try {
    body.model = JSON.parse(config);
  } catch (error) {
    throw new Error(`config.json: ${error.message}`);
  }
  if (Object(body.model) !== body.model || Array.isArray(body.model)) throw new Error('config.json: it must be a JSON object');
  return body;
}

const toAddress = (state) => {
  const kept = (state.config?.length ?? 0) > LONGEST ? { ...state, config: undefined } : state;
  const pairs = Object.entries(kept).filter(([, value]) => value !== undefined);
  history.replaceState(null, '', `#${new URLSearchParams(pairs)}`);
};

function fromAddress() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const field of form.elements) {
    if (!field.name) continue;
    const value = state.get(field.name) ?? '';
    if (field.multiple) for (const option of field.options) option.selected = value.split(',').includes(option.value);
    else field.value = value;
  }
  const { model, config } = form.elements;
  if (!state.get('model') && !config.value) model.selectedIndex = 0;
  for (const details of form.querySelectorAll('details')) details.open ||= [...details.querySelectorAll('[name]')].some((one) => one.value);
  showConfig();
}

function showConfig() {
  const isServed = form.elements.model.value !== '';
  at('config-field').hidden = at('file').hidden = isServed;
}

// --- plans -------------------------------------------------------------------------------------

/** Ask for a plan, again while another's is being made. */
async function post(body, signal) {
  for (;;) {
    try {
      return await call('v1/plan', { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body), signal });
    } catch (error) {
      if (error.code !== 'plan_busy') throw error;
      await new Promise((resolve) => { setTimeout(resolve, AGAIN_MS); });
    }
  }
}

/** Say, for a load, that the plan is being made, and for how long. Returns what ends that. */
function compute(state) {
  if (!LOAD.some((name) => state[name])) return () => {};
  const begin = performance.now();
  const tell = () => {
    at('computing').textContent = `Computing: choices are simulated, ${Math.round((performance.now() - begin) / 1000)} s…`;
    at('computing').hidden = false;
  };
  tell();
  const timer = setInterval(tell, 1000);
  return () => {
    clearInterval(timer);
    at('computing').hidden = true;
  };
}

/** Ask for what the form says, and show it. */
async function update() {
  asking?.abort();
  computed();
  const state = readForm();
  shown = JSON.stringify(state);
  toAddress(state);
  const isEmpty = !state.model && !state.config;
  at('empty').hidden = !isEmpty;
  if (isEmpty) {
    at('plan').hidden = true;
    at('problem').textContent = '';
    return;
  }
  const controller = asking = new AbortController();
  form.setAttribute('aria-busy', 'true');
  try {
    const body = bodyOf(state);
    computed = compute(state);
    if (!at('computing').hidden) at('plan').classList.add('stale');
    const answer = await (await post({ ...body, picture: true }, controller.signal)).json();
    showPlan(answer, chooseDevice);
    showChoices(answer, body.slo ?? []);
    at('problem').textContent = '';
    at('plan').classList.remove('stale');
  } catch (error) {
    if (error.name === 'AbortError') return;
    at('problem').textContent = error.message;
    at('plan').classList.add('stale'); // what is shown belongs to what was asked before
  }
  if (asking !== controller) return;
  computed();
  form.removeAttribute('aria-busy');
}

function chooseDevice(id) {
  for (const option of form.elements.on.options) option.selected = option.value === id;
  update();
}

function later() {
  showConfig();
  clearTimeout(waiting);
  waiting = setTimeout(() => { if (JSON.stringify(readForm()) !== shown) update(); }, WAIT_MS);
}

async function takeFile(file) {
  if (!file) return;
  form.elements.model.value = '';
  form.elements.config.value = await file.text();
  showConfig();
  update();
}

const NAMES = { json: 'plan.json', csv: 'plan.csv', markdown: 'plan.md', svg: 'plan.svg' };

/** Let the browser keep the plan in another form. */
async function download(format) {
  const done = compute(readForm());
  try {
    const response = await post({ ...bodyOf(readForm()), format });
    const link = element('a', { href: URL.createObjectURL(await response.blob()), download: NAMES[format] });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  } catch (error) {
    at('problem').textContent = error.message;
  }
  done();
}

async function start() {
  try {
    const choices = await (await call('v1/plan/devices')).json();
    fillChoices(choices);
    at('to-chat').hidden = !choices.chat;
  } catch (error) {
    at('problem').textContent = error.message;
    return;
  }
  fromAddress();
  for (const kind of ['input', 'change']) form.addEventListener(kind, later);
  form.addEventListener('submit', (event) => event.preventDefault());
  form.addEventListener('reset', () => setTimeout(() => { location.hash = ''; fromAddress(); update(); }));
  addEventListener('hashchange', () => { fromAddress(); update(); });
  addEventListener('dragover', (event) => { event.preventDefault(); form.classList.add('over'); });
  addEventListener('dragleave', () => form.classList.remove('over'));
  addEventListener('drop', (event) => {
    event.preventDefault();
    form.classList.remove('over');
    takeFile(event.dataTransfer.files[0]);
  });
  at('file').onchange = () => takeFile(at('file').files[0]);
  for (const button of at('buttons').querySelectorAll('button')) button.onclick = () => download(button.dataset.format);
  update();
}

start();
