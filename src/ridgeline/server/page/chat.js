// Conversations: the list, the messages, the composer. An answer goes on while another is shown.

import { complete } from './api.js';
import { copyButton, element, icon, iconButton } from './dom.js';
import { render } from './markdown.js';
import { conversations, create, remove, save, settings } from './store.js';

const IDEAS = [
  'Explain in three sentences how a rainbow forms.',
  'Write a haiku about a ridgeline at dawn.',
  'Write a Python function that reverses a list, with an example.',
];
const SAVE_MS = 2000; // how often an answer is kept while it grows
const at = (id) => document.getElementById(id);
const running = new Map(); // conversation -> AbortController
let open = null;

// --- the list of conversations ---------------------------------------------------------------

const titleOf = (conversation) => conversation.title || 'New conversation';

function showList() {
  at('conversations').replaceChildren(...conversations.map((conversation) => {
    const row = element('li', { className: conversation === open ? 'open' : '' });
    const title = element('button', {
      type: 'button', className: 'title', textContent: titleOf(conversation), onclick: () => show(conversation),
    });
    if (conversation === open) title.setAttribute('aria-current', 'true');
    if (running.has(conversation)) row.classList.add('busy');
    row.append(
      title,
      iconButton('rename', `Rename ${titleOf(conversation)}`, () => rename(row, conversation)),
      iconButton('delete', `Delete ${titleOf(conversation)}`, () => drop(conversation)),
    );
    return row;
  }));
}

function rename(row, conversation) {
  const field = element('input', { value: titleOf(conversation), maxLength: 80, 'aria-label': 'Title' });
  const finish = (isMeant) => {
    field.onblur = null;
    if (isMeant && field.value.trim()) conversation.title = field.value.trim();
    keep(conversation);
    showHead();
  };
  field.onblur = () => finish(true);
  field.onkeydown = (event) => {
    if (event.key === 'Enter') finish(true);
    if (event.key === 'Escape') finish(false);
  };
  row.replaceChildren(field);
  field.select();
}

function drop(conversation) {
  if (conversation.messages.length && !window.confirm(`Delete “${titleOf(conversation)}”?`)) return;
  running.get(conversation)?.abort();
  remove(conversation);
  if (conversation === open) show(conversations[0] ?? create());
  else showList();
}

// --- messages --------------------------------------------------------------------------------

function show(conversation) {
  open = conversation;
  at('messages').replaceChildren();
  conversation.messages.forEach(showMessage);
  showHead();
  document.body.dataset.view = 'chat';
  at('scroll').scrollTop = at('scroll').scrollHeight;
}

function showHead() {
  showList();
  const busy = running.has(open);
  at('title').textContent = titleOf(open);
  at('welcome').hidden = open.messages.length > 0;
  at('messages').setAttribute('aria-busy', String(busy));
  const [name, label] = busy ? ['stop', 'Stop'] : ['send', 'Send'];
  at('send').replaceChildren(icon(name));
  at('send').setAttribute('aria-label', label);
  at('send').title = busy ? 'Stop (Escape)' : 'Send (Enter)';
}

/** Show a message, new or again; the same element is kept while it grows. */
function showMessage(message) {
  let shown = [...at('messages').children].find((child) => child.message === message);
  if (!shown) {
    shown = element('article', { className: message.role, message, 'aria-label': message.role === 'user' ? 'You' : 'Answer' });
    shown.append(element('div', { className: 'body' }), element('footer'));
    at('messages').append(shown);
  }
  const [body, footer] = shown.children;
  if (message.role === 'user') body.textContent = message.content;
  else render(body, message.content);
  body.classList.toggle('growing', Boolean(message.isGrowing));
  footer.replaceChildren(...(message.isGrowing ? [] : footerOf(message)));
}

function footerOf(message) {
  const parts = [copyButton(() => message.content)];
  if (message.role !== 'assistant') return parts;
  if (message === open.messages.at(-1)) parts.push(iconButton('again', 'Answer again', again));
  const { usage, timings, reason, error } = message;
  const facts = [];
  if (usage) facts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
  if (usage?.prompt_tokens_details?.cached_tokens) facts.push(`${usage.prompt_tokens_details.cached_tokens} cached`);
  if (timings?.mean_itl_ms) facts.push(`${(1000 / timings.mean_itl_ms).toFixed(1)} tokens/s`);
  if (timings?.time_to_first_token_ms) facts.push(`first after ${seconds(timings.time_to_first_token_ms)}`);
  if (reason === 'length') facts.push('cut at max tokens');
  if (reason === 'stopped') facts.push('stopped');
  parts.push(element('span', { className: 'facts' }, facts.join('  ·  ')));
  if (error) parts.push(element('span', { className: 'problem', role: 'alert' }, error));
  return parts;
}

const seconds = (ms) => (ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`);

function keep(conversation) {
  if (!conversations.includes(conversation)) return; // deleted meanwhile
  conversation.savedAt = Date.now();
  at('hint').classList.toggle('problem', !save(conversation));
  showHint();
}

// --- asking ----------------------------------------------------------------------------------

function request(conversation) {
  const messages = conversation.messages
    .filter((message) => message.content)
    .map(({ role, content }) => ({ role, content }));
  if (settings.system) messages.unshift({ role: 'system', content: settings.system });
  const body = { messages };
  for (const name of ['temperature', 'top_p', 'max_tokens', 'seed']) {
    if (typeof settings[name] === 'number') body[name] = settings[name];
  }
  return body;
}

async function answer(conversation) {
  const controller = new AbortController();
  const body = request(conversation);
  const message = { role: 'assistant', content: '', isGrowing: true };
  conversation.messages.push(message);
  running.set(conversation, controller);
  let isDrawn = true;
  const draw = () => {
    isDrawn = true;
    if (conversation === open) atBottom(() => showMessage(message));
  };
  draw();
  showHead();
  const onText = (text) => {
    message.content += text;
    if (isDrawn) requestAnimationFrame(draw);
    isDrawn = false;
    if (Date.now() > conversation.savedAt + SAVE_MS) keep(conversation);
  };
  try {
    Object.assign(message, await complete(body, onText, controller.signal));
  } catch (error) {
    if (error.name === 'AbortError') message.reason = 'stopped';
    else message.error = error.message;
  }
  delete message.isGrowing;
  running.delete(conversation);
  keep(conversation);
  draw();
  showHead();
}

/** Change the messages; stay at their end, if that is where the reader is. */
function atBottom(change) {
  const scroll = at('scroll');
  const isThere = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
  change();
  if (isThere) scroll.scrollTop = scroll.scrollHeight;
}

function ask(text) {
  const question = { role: 'user', content: text };
  const conversation = open;
  conversation.messages.push(question);
  conversation.title ||= text.split('\n')[0].replace(/^(.{59}).{2,}$/, '$1…');
  for (const child of at('messages').children) child.querySelector('[title="Answer again"]')?.remove();
  showMessage(question);
  at('scroll').scrollTop = at('scroll').scrollHeight;
  keep(conversation);
  answer(conversation);
}

function again() {
  if (running.has(open)) return;
  open.messages.pop();
  at('messages').lastChild.remove();
  answer(open);
}

function submit(event) {
  event?.preventDefault();
  const field = at('question');
  if (running.has(open)) running.get(open).abort();
  else if (field.value.trim()) {
    ask(field.value.trim());
    field.value = '';
    grow();
  }
}

function grow() {
  const field = at('question');
  field.style.height = 'auto';
  field.style.height = `${field.scrollHeight}px`;
}

export function showHint() {
  const parts = [];
  if (at('hint').classList.contains('problem')) parts.push('This browser has no room to keep more.');
  if (settings.system) parts.push('system prompt set');
  for (const name of ['temperature', 'top_p', 'max_tokens', 'seed']) {
    if (typeof settings[name] === 'number') parts.push(`${name.replace('_', ' ')} ${settings[name]}`);
  }
  at('hint').textContent = parts.join('  ·  ');
}

export function start() {
  at('composer').onsubmit = submit;
  at('question').oninput = grow;
  at('question').onkeydown = (event) => {
    const isEnter = event.key === 'Enter' && !event.shiftKey && !event.isComposing;
    if (isEnter && !running.has(open)) submit(event);
    else if (isEnter) event.preventDefault();
  };
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && !document.querySelector('dialog[open]')) running.get(open)?.abort();
  });
  at('new').onclick = () => {
    show(conversations.find((one) => !one.messages.length) ?? create());
    at('question').focus();
  };
  at('ideas').replaceChildren(...IDEAS.map((idea) => element('button', { type: 'button', onclick: () => ask(idea) }, idea)));
  for (const message of conversations.flatMap((one) => one.messages)) {
    if (message.isGrowing) message.reason = 'stopped'; // the page was left
    delete message.isGrowing;
  }
  showHint();
  show(conversations[0] ?? create());
}
