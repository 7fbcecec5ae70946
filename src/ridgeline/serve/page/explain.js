// Requests that ended, and why each took as long as it did: the server says it, in words and a picture.

import { call } from './api.js';
import { element } from './dom.js';
import { settings } from './store.js';

const MOST = 12; // that are listed
const PERFETTO = 'https://ui.perfetto.dev'; // a viewer of timelines, which keeps them in the browser
const PATIENCE_MS = 60_000;
const list = element('ul', { id: 'ended' });
const section = element('section', { className: 'ended', hidden: true },
  element('h3', {}, 'Ended', element('span', {}, 'click for where its time went')), list);
const dialog = element('dialog', { className: 'explanation', 'aria-label': 'Where the time of a request went' });
document.querySelector('.running').after(section);
document.body.append(dialog);

let seen = new Set(); // requests of the last view
let model = settings.model;

/** Take the names of the sequences in a view; those of the view before that are missing have ended. */
export function follow(names) {
  if (model !== settings.model) forget();
  const now = new Set(names.map((name) => name.split('.')[0]));
  for (const request of seen) if (!now.has(request)) add(request);
  seen = now;
}

/** Whatever ran there is gone. */
export function forget() {
  seen = new Set();
  model = settings.model;
  list.replaceChildren();
  section.hidden = true;
}

function add(request) {
  const button = element('button', { type: 'button', onclick: () => explain(request, model) }, request);
  list.prepend(element('li', {}, button));
  while (list.children.length > MOST) list.lastChild.remove();
  section.hidden = false;
}

/** Show where the time of a request went, by its name or number and the model that answered. */
export async function explain(request, ofModel) {
  const ask = (format) => call(`v1/requests/${encodeURIComponent(request)}/explain?format=${format}`
    + (ofModel ? `&model=${encodeURIComponent(ofModel)}` : ''));
  const close = element('form', { method: 'dialog' }, element('button', { value: 'ok' }, 'Close'));
  let shown;
  try {
    const [told, picture] = await Promise.all([ask('json'), ask('svg')]);
    const { sentences, would_help: helpful, not_foreseen: untold } = await told.json();
    const save = element('button', { type: 'button', className: 'timeline', onclick: () => saveTimeline(ask, request, save) },
      'Save a timeline');
    const show = element('button', { type: 'button', className: 'timeline', onclick: () => showTimeline(ask, request, show) },
      'open it there');
    shown = [parse(await picture.text()), element('p', {}, sentences.join(' ')),
      element('p', {}, save, ' for ui.perfetto.dev, or ', show, ', without any text of prompts and answers')];
    const advice = (heading, points) => points.length
      ? [element('p', {}, heading), element('ul', {}, ...points.map((point) => element('li', {}, point)))] : [];
    shown.push(...advice('What would have helped:', helpful.map((one) => one.text)),
      ...advice('Not known whether it would have helped:', untold.map((one) => `${one.text}: ${one.reason}`)));
  } catch (error) {
    shown = [element('p', { className: 'problem', role: 'alert' }, error.message)];
  }
  dialog.replaceChildren(...shown, close);
  if (!dialog.open) dialog.showModal();
}

/** Save a file that ui.perfetto.dev opens. */
async function saveTimeline(ask, request, button) {
  try {
    const url = URL.createObjectURL(await (await ask('timeline')).blob());
    element('a', { href: url, download: `timeline-${request}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  } catch (error) {
    button.replaceWith(element('span', { className: 'problem', role: 'alert' }, error.message));
  }
}

/** Open ui.perfetto.dev, and hand it the timeline. */
async function showTimeline(ask, request, button) {
  const viewer = window.open(PERFETTO); // now: a window that opens later is blocked
  try {
    if (!viewer) throw new Error('The browser blocked a window: allow it, or save the timeline.');
    const buffer = await (await ask('timeline')).arrayBuffer();
    await answered(viewer);
    viewer.postMessage({ perfetto: { buffer, title: `Request ${request}`, fileName: `timeline-${request}.json` } }, PERFETTO);
  } catch (error) {
    button.replaceWith(element('span', { className: 'problem', role: 'alert' }, error.message));
  }
}

/** Resolve once the viewer is there: it answers PING with PONG, by its documentation on deep links. */
function answered(viewer) {
  return new Promise((resolve, reject) => {
    const asking = setInterval(() => viewer.postMessage('PING', PERFETTO), 100);
    const late = setTimeout(() => end(reject, new Error('ui.perfetto.dev did not answer: save the timeline.')), PATIENCE_MS);
    const hear = ({ data, source, origin }) => {
      if (source === viewer && origin === PERFETTO && data === 'PONG') end(resolve);
    };
    const end = (settle, value) => {
      clearInterval(asking);
      clearTimeout(late);
      removeEventListener('message', hear);
      settle(value);
    };
    addEventListener('message', hear);
  });
}

/** Return the picture as a part of this page, so that its colours follow the style sheet. */
function parse(text) {
  return document.importNode(new DOMParser().parseFromString(text, 'image/svg+xml').documentElement, true);
}
