// The colours of code, by highlight.js, which is fetched when the first code is to be shown.

import { element } from './dom.js';

const LIBRARY = './vendor/highlight.js-11.12.0/highlight.min.js';
const MAX_CHARS = 20_000; // of code that is coloured
let library = null;

/** Colour the code in an element, if its language is known. */
export async function colour(place, text, language) {
  if (!language || text.length > MAX_CHARS) return;
  library ??= (await import(LIBRARY).catch(() => null))?.default;
  if (!library?.getLanguage(language)) return;
  const { _emitter: found } = library.highlight(text, { language, ignoreIllegals: true });
  place.replaceChildren(...found.root.children.map(nodeOf));
}

/** Return a node of the library's tree, which has no HTML in it, as one of this page. */
function nodeOf(found) {
  if (typeof found === 'string') return found;
  const scope = (found.scope ?? '').split('.')[0];
  return element('span', { className: scope && `hl-${scope}` }, ...found.children.map(nodeOf));
}
