// The choices for a load, as the server made them: a table with intervals, and its picture.

import { element } from './dom.js';

const SHORT = 12; // rows, and those on the frontier, until all are asked for
const at = (id) => document.getElementById(id);
const whole = (value) => value.toLocaleString('en', { maximumFractionDigits: 0 });

/** Show a plan's choices; `bounds` are those that were asked for, as text. */
export function showChoices({ choices, picture }, bounds) {
  at('choices-part').hidden = !choices?.length;
  if (!choices?.length) return;
  const asked = bounds.map((text) => text.split(':').slice(0, 2));
  const columns = asked.length > 0 ? asked : [['ttft', 'p95'], ['tpot', 'mean']];
  const isBought = choices[0].purchase !== null;
  const costs = isBought ? ['USD to buy', 'most W', 'USD/Mtok'] : ['USD/h', 'busy'];
  const heads = ['choice', ...costs, ...columns.map(([metric, percentile]) => `${metric} ${percentile}, ms`), 'holds', 'limited by'];
  at('choices-head').replaceChildren(...heads.map((text) => element('th', {}, text)));
  const show = (some) => at('choices').replaceChildren(...some.map((one) => choiceRow(one, columns, asked.length > 0)));
  show(choices.filter((one, i) => i < SHORT || one.on_frontier));
  const all = at('all-choices');
  all.hidden = choices.length <= SHORT;
  all.textContent = `Show all ${choices.length}`;
  all.onclick = () => {
    show(choices);
    all.hidden = true;
  };
  showPicture(picture);
}

/** Return whether it holds what was asked; of clients at a time without a bound nothing was. */
function holdsOf(one, hasBounds) {
  if (!hasBounds && one.utilisation === null && one.holds_up_to_per_s === null) return '–';
  return one.meets_slo ? `${one.surely_meets_slo ? 'surely' : 'likely'}${one.simulated ? '' : ' ~'}` : 'no';
}

function choiceRow(one, columns, hasBounds) {
  const holds = holdsOf(one, hasBounds || one.purchase !== null);
  const million = one.usd_per_million_output_tokens;
  const costs = one.purchase
    ? [whole(one.purchase.usd), whole(one.purchase.watts), million === null ? '–' : million.toFixed(2)]
    : [one.usd_per_hour === null ? '–' : one.usd_per_hour.toFixed(2), one.utilisation === null ? '–' : `${Math.round(100 * one.utilisation)}%`];
  const cells = [
    ...costs,
    ...columns.map(([metric, percentile]) => span(one[`${metric}_ms`], percentile)),
  ];
  const name = element('td', {}, nameOf(one), one.on_frontier ? element('b', { title: 'on the frontier' }, ' ◆') : '');
  return element('tr', { className: one.meets_slo ? '' : 'unfit', title: one.price ? `price: ${one.price}` : 'no price is known' },
    name, ...cells.map((text) => element('td', {}, text)),
    element('td', {}, element('span', { className: `holds ${one.meets_slo ? holds.split(' ')[0] : 'no'}` }, holds)), element('td', {}, one.limited_by));
}

/** Return "2 x l4", with what divides the model. */
function nameOf({ device, num_devices: count, replicas, tp, pp, purchase }) {
  const host = purchase?.host ? ` in ${purchase.hosts} ${purchase.host}${purchase.hosts > 1 ? 's' : ''}` : '';
  if (tp * pp === 1) return `${count} x ${device}${host}`;
  const ways = [replicas > 1 && `${replicas} replicas`, tp > 1 && `tp ${tp}`, pp > 1 && `pp ${pp}`].filter(Boolean);
  return `${count} x ${device} (${ways.join(', ')})${host}`;
}

/** Return a latency with its interval; a dash where none is given. */
function span(latency, percentile) {
  if (latency === null) return '–';
  const high = latency[`${percentile}_high`];
  return `${whole(latency[percentile])} (${whole(latency[`${percentile}_low`])}–${high === null ? '?' : whole(high)})`;
}

/** Show the server's SVG, which is XML and never parsed as HTML. */
function showPicture(text) {
  const root = text && new DOMParser().parseFromString(text, 'image/svg+xml').documentElement;
  at('picture').hidden = !root;
  if (!root) return;
  root.setAttribute('role', 'img');
  root.setAttribute('aria-label', 'Tokens per second that a device bears, against those that a user sees');
  at('picture').replaceChildren(root);
}
