// Formulas in TeX, shown as MathML by Temml, which is fetched when the first one is to be shown.

import { element } from './dom.js';

const LIBRARY = new URL('./vendor/temml-0.13.5/temml.min.js', import.meta.url).href;
const STYLES = new URL('./vendor/temml-0.13.5/Temml-Local.css', import.meta.url).href;
const MAX_CHARS = 5000;
let fetching = null; // a promise of the library

function fetchLibrary() {
  fetching ??= new Promise((resolve, reject) => {
    const script = element('script', { src: LIBRARY, onload: () => resolve(window.temml), onerror: reject });
    document.head.append(element('link', { rel: 'stylesheet', href: STYLES }), script);
  });
  fetching.catch(() => { fetching = null; }); // to be tried again with the next formula
  return fetching;
}

/** Return an element with a formula. Until it can be shown, and where it cannot be read, it has the source. */
export function formula(source, tex, isDisplayed) {
  const made = element('span', { className: isDisplayed ? 'formula display' : 'formula' }, source);
  if (tex.length > MAX_CHARS) return made;
  if (window.temml) set(made, tex, isDisplayed);
  else fetchLibrary().then(() => set(made, tex, isDisplayed), () => {});
  return made;
}

function set(place, tex, isDisplayed) {
  const shown = element('span');
  try {
    window.temml.render(tex, shown, { displayMode: isDisplayed, throwOnError: true, trust: false, maxExpand: 200, maxSize: [10, 40] });
  } catch { // no TeX, or what Temml does not know
    return;
  }
  place.replaceChildren(...shown.childNodes);
}
