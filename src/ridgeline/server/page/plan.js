// The page of plans: a form whose state is in the address, and one request for each change. It
// computes nothing: what is shown comes from the server (plan_result.js shows it).

import { call } from './api.js';
import { element } from './dom.js';
import { showPlan } from './plan_result.js';

const WAIT_MS = 150; // after the last key
const LONGEST = 32_000; // characters of a config that an address may hold
const NUMBERS = ['context', 'concurrency', 'max_num_batched_tokens', 'block_size', 'gpu_memory_utilization'];
const at = (id) => document.getElementById(id);
const form = at('form');

let waiting = null;
let shown = ''; // the state that was asked for last, as text
let asking = null; // an AbortController while a request is under way

// --- the form ----------------------------------------------------------------------------------

const gibOf = (bytes) => `${(bytes / 2 ** 30).toFixed(bytes < 2 ** 33 ? 1 : 0)} GiB`;

function fillChoices({ models, devices, dtypes, kv_cache_dtypes: caches, engines }) {
  const choose = (name, options, first) => form.elements[name].replaceChildren(new Option(first, ''), ...options.map((one) => new Option(one, one)));
  choose('dtype', dtypes, "model's");
  choose('kv_cache_dtype', caches, "engine's");
  choose('engine', engines, 'fitting');
  form.elements.model.replaceChildren(...models.map((name) => new Option(name, name)), new Option('a config.json', ''));
  at('model-field').hidden = models.length === 0;
  const named = (device) => new Option(`${device.id}  –  ${device.name}, ${gibOf(device.usable_bytes)}`, device.id);
  const parents = [...new Set(devices.map((one) => one.parent).filter(Boolean))];
  form.elements.on.replaceChildren(
    new Option('all  –  every device that is rented whole', 'all'),
    ...devices.filter((one) => !one.parent).map(named),
    ...parents.map((parent) => (
      element('optgroup', { label: `slices of ${parent}` }, ...devices.filter((one) => one.parent === parent).map(named)))),
  );
}

/** Return what the form says, without what is left open. */
function readForm() {
  const found = {};
  for (const field of form.elements) {
    if (!field.name) continue;
    const value = field.multiple ? [...field.selectedOptions].map((one) => one.value).join(',') : field.value.trim();
    if (value) found[field.name] = value;
  }
  if (found.model) delete found.config;
  return found;
}

/** Return the body of a request. Throws an Error in words for a config that is no JSON object. */
function bodyOf({ config, ...wishes }) {
  const body = { ...wishes };
  for (const name of NUMBERS) if (body[name] && !Number.isNaN(Number(body[name]))) body[name] = Number(body[name]);
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

async function post(body, signal) {
  return call('v1/plan', { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body), signal });
}

/** Ask for what the form says, and show it. */
async function update() {
  asking?.abort();
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
  const mine = asking = new AbortController();
  form.setAttribute('aria-busy', 'true');
  try {
    const response = await post({ ...bodyOf(state), compare_published: true }, mine.signal);
    showPlan(await response.json(), chooseDevice);
    at('problem').textContent = '';
    at('plan').classList.remove('stale');
  } catch (error) {
    if (error.name === 'AbortError') return;
    at('problem').textContent = error.message;
    at('plan').classList.add('stale'); // what is shown belongs to what was asked before
  }
  if (asking === mine) form.removeAttribute('aria-busy');
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
  try {
    const response = await post({ ...bodyOf(readForm()), compare_published: true, format });
    const link = element('a', { href: URL.createObjectURL(await response.blob()), download: NAMES[format] });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  } catch (error) {
    at('problem').textContent = error.message;
  }
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
