// Conversations: the messages, the composer, and answers. An answer goes on while another is shown.

import { complete } from './api.js';
import { explain, request, samplingOf } from './asking.js';
import * as attaching from './attaching.js';
import {
  endOf, joinedUsage, keyOf, leaveOutOldest, newMessage, sentMessages, shownMessages,
} from './conversation.js';
import { element, icon } from './dom.js';
import { footerOf } from './footer.js';
import * as list from './list.js';
import { render } from './markdown.js';
import { addDelta, pretty, showCalls, showReasoning } from './parts.js';
import { conversations, create, isBlocked, onOtherTab, remove, save } from './store.js';
import * as tokens from './tokens.js';

const IDEAS = [
  'Explain in three sentences how a rainbow forms.',
  'Write a haiku about a ridgeline at dawn.',
  'Write a Python function that reverses a list, with an example.',
];
const SAVE_MS = 2000; // how often an answer is kept while it grows
const at = (id) => document.getElementById(id);
const running = new Map(); // conversation -> {controller, message, savedAt}
let open = null;
let hasRoom = true; // to keep conversations in this browser
let failedAgain = null; // {id, error, isTooLong}: why the answer with this id was not given again

// --- conversations ---------------------------------------------------------------------------

const showList = () => list.showList(open, (conversation) => running.has(conversation));

function rename(conversation, title) {
  if (title) {
    Object.assign(conversation, { title, changedAt: Date.now() });
    keep(conversation);
  }
  showHead();
}

function drop(conversation) {
  if (conversation.messages.length && !window.confirm(`Delete “${list.titleOf(conversation)}”?`)) return;
  running.get(conversation)?.controller.abort();
  remove(conversation);
  if (conversation === open) show(conversations[0] ?? create());
  else showList();
}

// --- messages --------------------------------------------------------------------------------

/** Show a conversation: its end, or one of its messages. */
function show(conversation, message = null) {
  open = conversation;
  showHint();
  at('messages').replaceChildren();
  showMessages();
  showHead();
  document.body.dataset.view = 'chat';
  if (message) showMessage(message).scrollIntoView({ block: 'start' });
  else at('scroll').scrollTop = at('scroll').scrollHeight;
}

/** Show all messages; elements that are there already stay, and move only if the order changed. */
function showMessages() {
  const before = [...at('messages').children];
  const articles = shownMessages(open).map(showMessage);
  const isSame = articles.length === before.length && articles.every((article, i) => article === before[i]);
  if (!isSame) at('messages').replaceChildren(...articles);
}

function showHead() {
  showList();
  const busy = running.has(open);
  at('title').textContent = list.titleOf(open);
  at('welcome').hidden = open.messages.length > 0;
  at('messages').setAttribute('aria-busy', String(busy));
  const [name, label] = busy ? ['stop', 'Stop'] : ['send', 'Send'];
  at('send').replaceChildren(icon(name));
  at('send').setAttribute('aria-label', label);
  at('send').title = busy ? 'Stop (Escape)' : 'Send (Enter)';
}

/** Show a message; all its versions share an element, which stays while an answer grows. */
function showMessage(message) {
  const key = keyOf(message);
  let article = [...at('messages').children].find((child) => child.key === key);
  if (!article) {
    article = element('article', { className: message.role, key, 'aria-label': message.role === 'user' ? 'You' : 'Answer' });
    article.append(
      element('div', { className: 'left-out' }), element('div'), element('div', { className: 'body' }),
      element('div', { className: 'calls' }), element('div'), element('footer'),
    );
    at('messages').append(article);
  }
  const [note, beside, body, calls, view, footer] = article.children;
  const isGrowing = running.get(open)?.message === message;
  if (message.role !== 'user') {
    render(body, message.isJson && message.content ? `\`\`\`json\n${pretty(message.content)}\n\`\`\`` : message.content);
    showReasoning(beside, message, isGrowing);
    const canSend = message === shownMessages(open).at(-1) && !running.has(open);
    showCalls(calls, message, canSend ? () => sendResults() : null);
  } else {
    attaching.showFiles(beside, message);
    if (!body.isEdited && body.textContent !== message.content) body.textContent = message.content;
  }
  if (view.message !== message) showTokens(article, message, null);
  body.classList.toggle('growing', isGrowing);
  const failure = failedAgain?.id === message.id ? failedAgain : null;
  footer.replaceChildren(...(isGrowing ? [] : footerOf(message, open, running.has(open) ? null : ACTS, failure)));
  note.replaceChildren(...(message.id === open.sentFrom ? leftOutNote() : []));
  return article;
}

const leftOutNote = () => [
  'Messages above this line are not sent to the model.',
  element('button', { type: 'button', className: 'action', onclick: sendAll }, 'Send them again'),
];

const ACTS = { // with a message
  edit: (message) => edit(message),
  answer: (message) => answer(open, message),
  goOn: (message) => goOn(message),
  leaveOut: () => leaveOut(),
  choose: (message, label) => choose(message, label),
  tokens: (message) => readTokens(message),
};

/** Show an answer token by token in the place of its text, or its text again. */
async function readTokens(message) {
  const article = showMessage(message);
  const view = article.children[4];
  if (view.firstChild) {
    showTokens(article, message, null);
    return;
  }
  showTokens(article, message, element('p', { className: 'note', role: 'status' }, 'Reading the answer again …'));
  const shown = view.firstChild;
  const found = await tokens.read(message, open.settings, sentMessages(open, message)).then(
    tokens.viewOf, (error) => element('p', { className: 'problem', role: 'alert' }, error.message));
  if (view.firstChild === shown) showTokens(article, message, found);
}

function showTokens(article, message, shown) {
  const [, , body, , view] = article.children;
  view.message = message;
  view.replaceChildren(...(shown ? [shown] : []));
  body.hidden = Boolean(shown?.classList.contains('tokens'));
}

function choose(message, label) {
  message.chosenAt = Date.now();
  keep(open);
  showMessages();
  showMessage(message).querySelector(`[title="${label}"]`).focus();
}

/** Let a question be written anew in its place. */
function edit(message) {
  const article = showMessage(message);
  const body = article.querySelector('.body');
  const field = element('textarea', { value: message.content, 'aria-label': 'Question' });
  const finish = (text) => {
    body.isEdited = false;
    article.classList.remove('edited');
    body.textContent = message.content;
    if (text && text !== message.content) askAgain(message, text);
    article.querySelector('[title="Edit"]')?.focus();
  };
  field.onkeydown = (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      finish(field.value.trim());
    } else if (event.key === 'Escape') finish(null);
  };
  const button = (label, onclick) => element('button', { type: 'button', className: 'action', onclick }, label);
  const choices = element('div', {}, button('Cancel', () => finish(null)), button('Send', () => finish(field.value.trim())));
  body.isEdited = true;
  article.classList.add('edited');
  body.replaceChildren(field, choices);
  field.style.height = `${field.scrollHeight + 2}px`;
  field.focus();
}

function keep(conversation) {
  if (!conversations.includes(conversation)) return; // deleted meanwhile
  if (running.has(conversation)) running.get(conversation).savedAt = Date.now();
  hasRoom = save(conversation);
  showHint();
}

/** Show what another tab has changed; write again what it has written over. */
function refresh(unwritten) {
  if (unwritten && !running.has(unwritten)) keep(unwritten); // an answer that grows is kept anyway
  for (const [conversation, { controller }] of running) {
    if (!conversations.includes(conversation)) controller.abort();
  }
  if (conversations.includes(open)) {
    atBottom(showMessages);
    showHead();
  } else show(conversations[0] ?? create());
  showHint();
}

// --- asking ----------------------------------------------------------------------------------

/** Answer the last question, or that of the answer `old` again. Returns what went wrong, or null. */
async function answer(conversation, old = null) {
  const body = request(conversation.settings, sentMessages(conversation, old));
  const isVersion = Boolean(old?.content || old?.calls);
  const parent = old ? old.parent : endOf(conversation);
  const message = newMessage('assistant', '', parent, isVersion ? { chosenAt: Date.now() } : {});
  if (old && !isVersion) { // it has no text: nothing to keep
    message.id = old.id;
    conversation.messages.splice(conversation.messages.indexOf(old), 1, message);
  } else conversation.messages.push(message);
  if (conversation.settings.schema) message.isJson = true;
  const failure = await receive(conversation, message, body);
  if (isVersion && !message.content && !message.calls) { // nothing came, so the old answer stays
    conversation.messages.splice(conversation.messages.indexOf(message), 1);
    if (failure) failedAgain = { id: old.id, ...failure };
  } else Object.assign(message, failure);
  keep(conversation);
  showChange(conversation);
  return failure;
}

/** Go on with the last answer, which was cut or stopped. */
async function goOn(message) {
  const conversation = open;
  const body = request(conversation.settings, [...sentMessages(conversation, message), message], true);
  const { usage } = message;
  for (const name of ['reason', 'error', 'isTooLong', 'usage', 'timings', 'capped', 'ignored']) delete message[name];
  at('question').focus();
  const failure = await receive(conversation, message, body);
  Object.assign(message, failure, { usage: joinedUsage(usage, message.usage) });
  keep(conversation);
  showChange(conversation);
}

/** Send a request, and add what comes to a message. Returns what went wrong, or null. */
async function receive(conversation, message, body) {
  failedAgain = null;
  const controller = new AbortController();
  running.set(conversation, { controller, message, savedAt: Date.now() });
  let isDrawn = true;
  const draw = () => {
    isDrawn = true;
    const isGrowing = running.get(conversation)?.message === message; // else it was drawn at its end
    if (conversation === open && isGrowing) atBottom(() => showMessage(message));
  };
  const onBegin = ({ id, capped, ignored }) => {
    document.dispatchEvent(new Event('answering'));
    message.requests = [...message.requests ?? [], { id }];
    if (capped) message.capped = capped;
    if (ignored) message.ignored = ignored;
  };
  const onDelta = (delta, model) => {
    addDelta(message, delta);
    message.requests.at(-1).model = model;
    message.changedAt = Date.now();
    if (isDrawn) requestAnimationFrame(draw);
    isDrawn = false;
    if (Date.now() > running.get(conversation).savedAt + SAVE_MS) keep(conversation);
  };
  showChange(conversation);
  let failure = null;
  try {
    Object.assign(message, await complete(body, { onBegin, onDelta }, controller.signal));
  } catch (error) {
    if (error.name === 'AbortError') message.reason = 'stopped';
    else failure = await explain(error, conversation);
  }
  if (message.reason === 'length') message.isFull = Boolean(message.capped) || !(body.max_tokens > 0);
  message.changedAt = Date.now();
  running.delete(conversation);
  return failure;
}

function showChange(conversation) {
  if (conversation === open) atBottom(showMessages);
  showHead();
}

/** Change the messages; stay at their end, if that is where the reader is. */
function atBottom(change) {
  const scroll = at('scroll');
  const isThere = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
  change();
  if (isThere) scroll.scrollTop = scroll.scrollHeight;
}

function ask(text, attachments = []) {
  const conversation = open;
  const extra = attachments.length ? { attachments } : {};
  conversation.messages.push(newMessage('user', text, endOf(conversation), extra));
  if (!conversation.title) {
    const title = (text || attachments[0].name).split('\n')[0].replace(/^(.{59}).{2,}$/, '$1…');
    Object.assign(conversation, { title, changedAt: Date.now() });
  }
  keep(conversation);
  answer(conversation);
  at('scroll').scrollTop = at('scroll').scrollHeight;
}

/** Go on with what the tools of the last answer returned. */
function sendResults() {
  keep(open);
  return answer(open);
}

/** Ask a question in other words; the old one stays, with all that followed it. */
function askAgain(question, text) {
  const { attachments } = question;
  const extra = { chosenAt: Date.now(), ...(attachments && { attachments }) };
  open.messages.push(newMessage('user', text, question.parent, extra));
  keep(open);
  answer(open);
}

/** Answer with ever fewer messages sent, until they fit. */
async function leaveOut() {
  const conversation = open;
  let failure = null;
  do {
    leaveOutOldest(conversation);
    failure = await answer(conversation, shownMessages(conversation).at(-1));
  } while (failure?.isTooLong);
}

function sendAll() {
  Object.assign(open, { sentFrom: null, changedAt: Date.now() });
  keep(open);
  showMessages();
}

function submit(event) {
  event?.preventDefault();
  const field = at('question');
  if (running.has(open)) running.get(open).controller.abort();
  else if (!attaching.isReading() && (field.value.trim() || attaching.hasFiles())) {
    ask(field.value.trim(), attaching.takeFiles());
    field.value = '';
    grow();
  }
}

function grow() {
  const field = at('question');
  field.style.height = 'auto';
  const border = field.offsetHeight - field.clientHeight;
  field.style.height = `${field.scrollHeight + border}px`;
}

/** Change the settings of the conversation that is shown. */
export function keepSettings(settings) {
  Object.assign(open, { settings, changedAt: Date.now() });
  keep(open);
}

export const settingsOfOpen = () => open.settings;

/** Show conversations that were added. */
export const showAdded = () => show(conversations[0]);

function showHint() {
  const parts = [];
  if (isBlocked) parts.push('Storage is blocked: nothing is kept after this page closes.');
  else if (!hasRoom) parts.push('This browser has no room to keep more.');
  at('hint').classList.toggle('problem', isBlocked || !hasRoom);
  const { settings } = open;
  if (settings.system) parts.push('system prompt set');
  if (settings.tools) parts.push('tools set');
  if (settings.schema) parts.push('JSON schema set');
  if (settings.thinking) parts.push(`thinking ${settings.thinking}`);
  for (const [name, value] of Object.entries(samplingOf(settings))) {
    parts.push(`${name.replaceAll('_', ' ')} ${Array.isArray(value) ? JSON.stringify(value) : value}`);
  }
  at('hint').textContent = parts.join('  ·  ');
}

/** Begin a conversation, or show the one that has not begun. */
export function begin() {
  at('search').value = '';
  show(conversations.find((one) => !one.messages.length) ?? create());
  at('question').focus();
}

/** Delete the conversation that is shown. */
export const dropOpen = () => drop(open);

export function start() {
  list.start({ show, drop, rename }, showList);
  attaching.start();
  at('composer').onsubmit = submit;
  at('question').oninput = grow;
  at('question').onkeydown = (event) => {
    const isEnter = event.key === 'Enter' && !event.shiftKey && !event.isComposing;
    if (isEnter && !running.has(open)) submit(event);
    else if (isEnter) event.preventDefault();
  };
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && !document.querySelector('dialog[open]')) running.get(open)?.controller.abort();
  });
  at('new').onclick = begin;
  at('ideas').replaceChildren(...IDEAS.map((idea) => element('button', { type: 'button', onclick: () => ask(idea) }, idea)));
  onOtherTab(refresh);
  show(conversations[0] ?? create());
}
