// Export and import: all conversations in one file, and back.

import { problemOf } from './parts.js';
import { element } from './dom.js';
import { add, conversations, toConversation } from './store.js';

const FORMAT = 'ridgeline conversations';

/** Save all conversations in a file of the reader's. */
export function exportAll() {
  const kept = conversations.filter((conversation) => conversation.messages.length);
  const text = JSON.stringify({ format: FORMAT, version: 1, conversations: kept }, null, 1);
  const url = URL.createObjectURL(new Blob([text], { type: 'application/json' }));
  const day = new Date().toISOString().slice(0, 10);
  element('a', { href: url, download: `ridgeline-conversations-${day}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Add the conversations of a file that was exported; of one that is here already, what is new. */
export async function importFile(file) {
  let exported;
  try {
    exported = JSON.parse(await file.text());
  } catch (error) {
    return refused(file, `it is not JSON (${error.message})`);
  }
  if (exported?.format !== FORMAT || !Array.isArray(exported.conversations)) {
    return refused(file, `its format is not “${FORMAT}”`);
  }
  const read = exported.conversations.map((one) => (isWhole(one) ? toConversation(one, one.id) : null));
  const wrong = read.indexOf(null);
  if (wrong >= 0) return refused(file, `conversation ${wrong + 1} of ${read.length} is damaged`);
  const hasRoom = add(read);
  const message = `${read.length} ${read.length === 1 ? 'conversation' : 'conversations'} imported.`;
  return { message: hasRoom ? message : `${message} This browser has no room to keep them all.`, isDone: true };
}

const refused = ({ name }, reason) => ({ message: `Nothing was imported from ${name}: ${reason}.`, isDone: false });

/** Whether a conversation has what the page takes for granted. */
function isWhole(one) {
  const settings = one?.settings;
  return typeof one?.id === 'string' && typeof one.title === 'string' && settings !== null && typeof settings === 'object'
    && ['tools', 'schema', 'system'].every((name) => typeof (settings[name] ?? '') === 'string' && !problemOf(name, settings[name] ?? ''));
}
