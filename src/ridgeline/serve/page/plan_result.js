// A plan as the server made it: the answer, a bar, its lines, the devices, and a formula beside it.
// Of numbers it knows only how people read them.

import { decimalSize, element } from './dom.js';

const PARTS = [ // of the bar: name, field, in the order of the colours
  ['weights', 'weights_bytes'], ['KV cache', 'kv_bytes'], ['activations', 'activation_bytes'], ['framework', 'overhead_bytes'],
];
const at = (id) => document.getElementById(id);
const number = (value) => value.toLocaleString('en');

/** Return bytes as people read them. */
function size(bytes) {
  for (const [unit, name] of [[2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']]) {
    if (Math.abs(bytes) >= unit) return `${(bytes / unit).toFixed(Math.abs(bytes) >= 10 * unit ? 1 : 2)} ${name}`;
  }
  return `${bytes} B`;
}

/** Return a sentence as pieces in which flags of the command line stay whole. */
const flagged = (text) => text.split(/(--[a-z-]+(?: \d[\w.]*)?)/).map((piece, i) => (i % 2 ? element('code', {}, piece) : piece));

/** Show a plan; `choose` is called with the id of a device that is clicked. */
export function showPlan(plan, choose) {
  at('plan').hidden = false;
  showFacts(plan);
  showBar(plan.memory);
  const lines = plan.memory.lines.map((line) => row(line.name, size(line.bytes), line.how));
  const needed = plan.memory.per_device.needed_bytes;
  lines.splice(-1, 0, row('needs', size(needed), decimalSize(needed))); // before the margin, which stays free
  at('lines').replaceChildren(...lines);
  showOffload(plan.offload);
  // Over a machine the answer is not of one card, which alone is too small.
  at('memory-part').hidden = Boolean(plan.offload?.is_asked);
  at('devices-part').hidden = plan.devices.length < 2 || at('memory-part').hidden;
  at('devices').replaceChildren(...plan.devices.map((one) => deviceRow(one, plan.memory, choose)));
  showPublished(plan);
  at('assumptions').replaceChildren(
    ...plan.warnings.map((text) => element('li', { className: 'warning' }, ...flagged(text))),
    ...plan.assumptions.map((text) => element('li', {}, ...flagged(text))));
}

const row = (name, value, how) => element('tr', {}, element('td', {}, name), element('td', {}, value), element('td', {}, how));

function showFacts({ model, memory, answer, choices, offload }) {
  const billions = (count) => `${(count / 1e9).toFixed(count < 1e10 ? 2 : 1)} B`;
  const active = model.num_active_params < model.num_params ? `, ${billions(model.num_active_params)} of them active` : '';
  at('facts').textContent = `${model.name}: ${billions(model.num_params)} parameters${active}; ${model.kinds.join(', ')}`;
  // Of memory the answer is what "it" does; for a load it is a sentence of its own.
  at('answer').replaceChildren(choices ? '' : 'It ', ...flagged(choices ? answer[0].toUpperCase() + answer.slice(1) : answer), '.');
  at('answer').className = offload?.is_asked ? 'answer fits' : (choices ? choices[0]?.meets_slo : memory.fits) ? 'answer fits' : 'answer';
}

/** Show what is on each device of a machine, and how long a token takes there. */
function showOffload(offload) {
  at('offload-part').hidden = !offload;
  if (!offload) return;
  const rate = (value) => value.toFixed(value < 1 ? 2 : value < 10 ? 1 : 0);
  const { tokens_per_s: mid, tokens_per_s_low: low, tokens_per_s_high: high } = offload;
  at('offload-speed').textContent = `${rate(mid)} tokens/s (${rate(low)} to ${rate(high)})`;
  const { prompt_tokens_per_s: read, prompt_tokens_per_s_low: least, prompt_tokens_per_s_high: most } = offload;
  at('offload-prompts').textContent = `Prompts are read at ${rate(read)} tokens/s (${rate(least)} to ${rate(most)}). Type:`;
  at('offload-command').textContent = offload.command;
  at('offload').replaceChildren(...offload.devices.flatMap((one) => [
    Object.assign(row(one.device, size(one.total_bytes), `${one.capacity_bytes ? `of ${size(one.capacity_bytes)}, ` : ''}${one.token_ms.toFixed(1)} ms a token`), { className: 'device' }),
    ...one.lines.map((line) => row(`– ${line.name}`, size(line.bytes), line.how)),
  ]));
}

function showBar({ device, num_devices: count, per_device: one }) {
  const used = PARTS.map(([name, field]) => [name, one[field]]);
  const margin = used.reduce((left, [, bytes]) => left - bytes, one.total_bytes);
  const parts = [...used, ['margin', margin]];
  const spare = one.capacity_bytes - one.total_bytes;
  at('bar-note').textContent = `${count > 1 ? `${count} × ` : ''}${device}, ${size(one.capacity_bytes)}${count > 1 ? ' each' : ''}`;
  at('bar').setAttribute('aria-label', parts.map(([name, bytes]) => `${name} ${size(bytes)}`).join(', '));
  const pieces = parts.map(([name, bytes], i) => piece(`plan-${i}`, bytes, `${name} ${size(bytes)}`));
  if (spare > 0) pieces.push(piece('rest', spare, `free ${size(spare)}`));
  if (spare < 0) { // the device ends before the bar does
    const end = element('b', { title: `the device ends here: ${size(-spare)} too much` });
    end.style.left = `${(100 * one.capacity_bytes) / one.total_bytes}%`;
    pieces.push(end);
  }
  at('bar').replaceChildren(...pieces);
  const legend = spare >= 0 ? [...parts, ['free', spare]] : parts;
  at('legend').replaceChildren(...legend.map(([name, bytes], i) => (
    element('span', {}, element('i', { className: name === 'free' ? 'rest' : `plan-${i}` }), `${name} ${size(bytes)}`))));
}

function piece(className, bytes, title) {
  const made = element('i', { className, title });
  made.style.flexGrow = Math.max(bytes, 0);
  return made;
}

function deviceRow(one, memory, choose) {
  const name = element('button', { type: 'button', className: 'link', onclick: () => choose(one.device) }, one.device);
  const bar = element('div', { className: 'small', title: `${size(one.total_bytes)} of ${size(one.capacity_bytes)}` }, element('i'));
  bar.firstChild.style.width = `${Math.min(100, (100 * one.total_bytes) / one.capacity_bytes)}%`;
  const cells = one.fits
    ? [size(one.spare_bytes), one.max_context_tokens === null ? 'any' : number(one.max_context_tokens), one.max_concurrency >= 2 ** 32 ? 'any' : number(one.max_concurrency)]
    : ['does not fit', '–', '–'];
  const made = element('tr', { className: one.fits ? '' : 'unfit', title: one.would_help.length ? `would help: ${one.would_help.join(' or ')}` : '' },
    element('td', {}, name), element('td', {}, number(one.tp * one.pp)), element('td', {}, bar), ...cells.map((text) => element('td', {}, text)));
  if (one.device === memory.device) made.setAttribute('aria-current', 'true');
  return made;
}

function showPublished({ published, memory }) {
  at('published-part').hidden = !published;
  if (!published) return;
  const one = memory.per_device;
  const gb = (bytes) => (bytes / 1e9).toFixed(2);
  const both = (flash, plain) => `${flash.toFixed(2)} with flash attention, ${plain.toFixed(2)} without`;
  const rows = [
    ['weights', gb(one.weights_bytes), published.weights_gb.toFixed(2)],
    ['KV cache', gb(one.kv_bytes), published.kv_gb.toFixed(2)],
    ['activations', gb(one.activation_bytes), both(published.activations_gb, published.plain_activations_gb)],
    ['framework and margin', gb(one.total_bytes - one.weights_bytes - one.kv_bytes - one.activation_bytes), 'none'],
    ['total', gb(one.total_bytes), both(published.total_gb, published.plain_total_gb)],
  ];
  at('published').replaceChildren(...rows.map((cells) => row(...cells)));
  at('why-wrong').replaceChildren(...published.why_wrong.map((why) => element('li', {}, why)));
}
