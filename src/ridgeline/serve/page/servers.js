// The servers of a model, where it has several: what they do, and what became of others. Asks for
// them every two seconds while the page is open.

import { call } from './api.js';
import { element } from './dom.js';
import { settings } from './store.js';

const PERIOD_MS = 2000;
const NUM_EVENTS = 4; // the last ones
const at = (id) => document.getElementById(id);
const time = (seconds) => new Date(seconds * 1000).toLocaleTimeString();
const count = (number, what) => `${number} ${what}${number === 1 ? '' : 's'}`;

let canAsk = false; // a server by itself has no list of servers, and not every key may see one
let askedAt = 0;

/** Take note of the models, as the server lists them: a router says how many servers each has. */
export function know(models) {
  canAsk = models.some(({ status }) => status?.num_servers !== undefined);
}

/** Ask for them, if the last time is long ago. */
export async function look() {
  if (!canAsk || Date.now() - askedAt < PERIOD_MS) return;
  askedAt = Date.now();
  try {
    const { models } = await (await call('v1/fleet')).json();
    show(models[settings.model] ?? Object.values(models)[0]);
  } catch (error) {
    canAsk = error.code !== 'not_allowed';
    at('servers').hidden = true;
  }
}

function show(model) {
  const hadOthers = model?.events.some(({ server }) => server > model.wanted); // of other machines
  at('servers').hidden = !model || (model.wanted < 2 && model.replicas.length < 2 && !hadOthers);
  if (at('servers').hidden) return;
  const ready = model.replicas.filter(({ state }) => state === 'ready').length;
  const total = Math.max(model.wanted, model.replicas.length);
  at('servers-note').textContent = `${ready} of ${total} ready`;
  at('servers-machine').hidden = !hasOthers(model);
  at('servers-rows').replaceChildren(...model.replicas.map((server) => row(server, hasOthers(model))));
  const facts = [`${count(model.resumed, 'stream')} continued elsewhere`, `${count(model.again, 'request')} retried`];
  if (model.diverged) facts.push(`${count(model.diverged, 'stream')} could not continue`);
  at('servers-facts').textContent = facts.join('  ·  ');
  const events = model.events.slice(-NUM_EVENTS).reverse();
  at('servers-events').replaceChildren(...events.map((event) => (
    element('li', {}, `${time(event.time)}  server ${event.server} ${event.what}`))));
}

function hasOthers(model) {
  return model.replicas.some(({ node }) => node);
}

function row({ name, node, state, running, moved, deaths, pid, since, reason }, showsMachine) {
  const title = [node, pid && `process ${pid}`, since && `since ${time(since)}`, reason].filter(Boolean).join(', ');
  const machine = showsMachine ? [node || 'this one'] : [];
  const cells = [name, state, running ?? '–', moved, deaths, ...machine].map((text) => element('td', {}, String(text)));
  return element('tr', { title, className: state }, ...cells);
}
