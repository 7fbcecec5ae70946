// Files that go with a question: chosen, dropped or pasted, read as text here, and shown beside it.
// Knows nothing of conversations.

import { element, iconButton } from './dom.js';
import { textOfPdf } from './pdf.js';

const MAX_FILE_BYTES = 50_000_000;
const MAX_CHARS = 2_000_000; // more than models read; this browser keeps about 5,000,000 in all
const at = (id) => document.getElementById(id);
let files = []; // {name, text}; text is null while it is read

const number = (value) => value.toLocaleString('en');
const counted = (count, one) => `${number(count)} ${one}${count === 1 ? '' : 's'}`;
const wordsOf = (text) => counted(text.split(/\s+/).filter(Boolean).length, 'word');
const isPdf = (file) => file.type === 'application/pdf' || /\.pdf$/i.test(file.name);

export const isReading = () => files.some(({ text }) => text === null);
export const hasFiles = () => files.length > 0;

/** Return the files that are to go with the question; none are left. */
export function takeFiles() {
  const taken = files;
  files = [];
  at('attach-problem').textContent = '';
  show();
  return taken;
}

/** Return the text of a file. Throws an Error whose message goes on with the file's name. */
async function textOf(file) {
  if (file.type.startsWith('image/')) throw new Error('is an image, and the model reads text alone');
  if (file.size > MAX_FILE_BYTES) throw new Error(`has ${number(file.size)} bytes: at most ${number(MAX_FILE_BYTES)} can be attached`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  const text = isPdf(file) ? await textOfPdf(bytes) : decode(bytes);
  if (!text.trim()) throw new Error('is empty');
  if (text.length > MAX_CHARS) throw new Error(`has ${number(text.length)} characters: at most ${number(MAX_CHARS)} can be attached`);
  return text;
}

function decode(bytes) {
  const mark = (bytes[0] << 8) | bytes[1];
  const encoding = { 0xfffe: 'utf-16le', 0xfeff: 'utf-16be' }[mark] ?? 'utf-8';
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    if (!text.includes('\0')) return text;
  } catch { // bytes that are no text
  }
  throw new Error('is neither a PDF nor text in UTF-8, so it cannot be read');
}

/** Read files, and have them go with the next question. */
async function attach(chosen) {
  at('attach-problem').textContent = '';
  await Promise.all([...chosen].map(async (file) => {
    const entry = { name: file.name, text: null };
    files.push(entry);
    show();
    try {
      entry.text = await textOf(file);
    } catch (error) {
      files = files.filter((one) => one !== entry);
      const lines = [at('attach-problem').textContent, `${file.name} ${error.message}.`];
      at('attach-problem').textContent = lines.filter(Boolean).join('\n');
    }
    show();
  }));
  at('question').focus();
}

function show() {
  at('attached').replaceChildren(...files.map((entry) => element('li', {},
    element('b', {}, entry.name),
    element('small', {}, entry.text === null ? 'reading…' : wordsOf(entry.text)),
    iconButton('close', `Remove ${entry.name}`, () => {
      files = files.filter((one) => one !== entry);
      show();
      at('question').focus();
    }))));
}

/** Show the files of a question in `place`, each folded. */
export function showFiles(place, { attachments = [] }) {
  if (place.shown === attachments) return; // what is open stays
  place.shown = attachments;
  place.className = 'attachments';
  place.replaceChildren(...attachments.map(({ name, text }) => element('details', {},
    element('summary', {}, element('b', {}, name), element('small', {}, wordsOf(text))),
    element('pre', { tabIndex: 0 }, text))));
}

export function start() {
  at('attach').onclick = () => at('attach-file').click();
  at('attach-file').onchange = () => {
    attach(at('attach-file').files);
    at('attach-file').value = ''; // so that the same file can be chosen again
  };
  at('question').onpaste = (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attach(event.clipboardData.files);
  };
  const chat = document.querySelector('.chat');
  const brings = (event) => event.dataTransfer.types.includes('Files');
  chat.ondragover = (event) => {
    if (brings(event)) event.preventDefault();
    chat.classList.toggle('dropping', brings(event));
  };
  chat.ondragleave = () => chat.classList.remove('dropping');
  chat.ondrop = (event) => {
    chat.classList.remove('dropping');
    if (!brings(event)) return;
    event.preventDefault();
    attach(event.dataTransfer.files);
  };
}
