// The page: which of its parts are shown, the model's name, the settings, export and import.

import { call, fetchModels } from './api.js';
import * as chat from './chat.js';
import * as live from './live.js';
import * as servers from './servers.js';
import { entered, openSettings } from './settings.js';
import * as shortcuts from './shortcuts.js';
import { read, saveSettings, settings, write } from './store.js';
import { exportAll, importFile } from './transfer.js';

const FOLDED = 'ridgeline.folded';
const at = (id) => document.getElementById(id);

function showTabs() {
  for (const button of document.querySelectorAll('[data-show]')) {
    const isShown = document.body.dataset.view === button.dataset.show;
    button.setAttribute('aria-pressed', String(isShown));
    button.onclick = () => { document.body.dataset.view = button.dataset.show; };
  }
}

const tune = () => openSettings(chat.settingsOfOpen());

/** Take over what was entered; Escape does not submit. */
const keepSettings = () => chat.keepSettings(entered(chat.settingsOfOpen()));

/** Show the engine's panel, or fold it away, where it stands beside the chat. */
function fold(isFolded) {
  document.body.dataset.panel = isFolded ? 'folded' : 'shown';
  at('fold').setAttribute('aria-expanded', String(!isFolded));
  const words = isFolded ? 'Show the engine panel' : 'Fold the engine panel';
  at('fold').title = words;
  at('fold').setAttribute('aria-label', words);
}

function foldOrUnfold() {
  const isFolded = document.body.dataset.panel !== 'folded';
  fold(isFolded);
  write(FOLDED, isFolded);
}

function search() {
  if (at('search').offsetParent === null) document.body.dataset.view = 'side';
  at('search').select();
  at('search').focus();
}

/** Add the conversations of a file, and say what came of it. */
async function importChosen() {
  const [file] = at('import-file').files;
  at('import-file').value = ''; // so that the same file can be chosen again
  if (!file) return;
  const { message, isDone } = await importFile(file);
  at('transfer-note').textContent = message;
  at('transfer-note').classList.toggle('problem', !isDone);
  if (isDone) chat.showAdded();
}

/** Show the name of the model, or the choice of those that can chat; keep the one that was chosen before. */
async function showModels() {
  try {
    const models = await fetchModels();
    const names = await thatChat(models.map((model) => model.id));
    servers.know(models);
    const isOne = models.length === 1;
    if (isOne) delete settings.model; // requests need not name it
    else if (!names.includes(settings.model)) [settings.model] = names;
    at('model').textContent = isOne ? names[0] : '';
    at('models').hidden = isOne;
    at('models').replaceChildren(...names.map((name) => new Option(name, name)));
    at('models').value = settings.model;
    document.title = `${settings.model ?? names[0]} – Ridgeline`;
  } catch (error) {
    at('model').textContent = error.message;
  }
}

/** Return those of several models that give answers; all where none does. */
async function thatChat(names) {
  if (names.length === 1) return names;
  const { data } = await (await call('api/v0/models')).json();
  const encoders = data.filter(({ type }) => type === 'embeddings').map(({ id }) => id);
  const others = names.filter((name) => !encoders.includes(name));
  return others.length ? others : names;
}

function chooseModel() {
  settings.model = at('models').value;
  saveSettings();
  document.title = `${settings.model} – Ridgeline`;
  live.restart();
}

new MutationObserver(showTabs).observe(document.body, { attributeFilter: ['data-view'] });
showTabs();
fold(read(FOLDED) === true);
at('fold').onclick = foldOrUnfold;
at('tune-button').onclick = tune;
// Not onclose, which waits for the next frame: a tab that goes to the background has none.
at('tune-dialog').querySelector('form').onsubmit = keepSettings;
at('export').onclick = exportAll;
at('import').onclick = () => at('import-file').click();
at('import-file').onchange = importChosen;
chat.start();
shortcuts.start({ begin: chat.begin, search, drop: chat.dropOpen, tune, fold: foldOrUnfold });
at('models').onchange = chooseModel;
document.addEventListener('answering', () => {
  live.wake();
  at('transfer-note').textContent = ''; // what it said is over
});
await showModels();
live.start();
