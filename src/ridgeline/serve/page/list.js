// The list of conversations, and the search through all that was said in them.

import { find } from './conversation.js';
import { element, iconButton } from './dom.js';
import { conversations } from './store.js';

const at = (id) => document.getElementById(id);
let acts = null; // {show, drop, rename}: what is done with a conversation

export const titleOf = (conversation) => conversation.title || 'New conversation';

/** Show all conversations, or those in which the words of the search stand. `isRunning` says of one whether it is being answered. */
export function showList(open, isRunning) {
  if (at('conversations').querySelector('input')) return; // a title is being written
  const words = at('search').value.trim();
  const found = conversations
    .map((conversation) => ({ conversation, place: words ? find(conversation, words) : null }))
    .filter(({ place }) => place || !words);
  at('conversations').replaceChildren(...found.map(({ conversation, place }) => (
    row(conversation, place, conversation === open, isRunning(conversation)))));
  at('search-note').textContent = words ? `found in ${found.length} of ${conversations.length}` : '';
}

function row(conversation, place, isOpen, isBusy) {
  const title = element('button', { type: 'button', className: 'title', onclick: () => acts.show(conversation, place?.message) },
    element('span', {}, titleOf(conversation)));
  if (place?.message) title.append(element('small', {}, place.before, element('mark', {}, place.found), place.after));
  if (isOpen) title.setAttribute('aria-current', 'true');
  const made = element('li', { className: `${isOpen ? 'open' : ''} ${isBusy ? 'busy' : ''}` });
  made.append(
    title,
    iconButton('rename', `Rename ${titleOf(conversation)}`, () => rename(made, conversation)),
    iconButton('delete', `Delete ${titleOf(conversation)}`, () => acts.drop(conversation)),
  );
  return made;
}

function rename(place, conversation) {
  const field = element('input', { value: titleOf(conversation), maxLength: 80, 'aria-label': 'Title' });
  const finish = (isMeant) => {
    field.onblur = null;
    field.remove();
    acts.rename(conversation, isMeant ? field.value.trim() : '');
  };
  field.onblur = () => finish(true);
  field.onkeydown = (event) => {
    event.stopPropagation(); // Escape is for the field, not for an answer
    if (event.key === 'Enter') finish(true);
    if (event.key === 'Escape') finish(false);
  };
  place.replaceChildren(field);
  field.select();
}

/** `changed` is called when the words of the search have changed. */
export function start(actions, changed) {
  acts = actions;
  at('search').oninput = changed;
  at('search').onkeydown = (event) => {
    if (event.key === 'Escape') { // some browsers empty the field themselves, others do not
      event.stopPropagation();
      at('search').value = '';
      changed();
    } else if (event.key === 'Enter') at('conversations').querySelector('.title')?.click();
  };
}
