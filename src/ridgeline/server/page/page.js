// The page: which of its parts a narrow screen shows, the model's name, the settings, export and import.

import { fetchModels } from './api.js';
import * as chat from './chat.js';
import * as live from './live.js';
import { problemOf } from './parts.js';
import { saveSettings, settings } from './store.js';
import { exportAll, importFile } from './transfer.js';

const at = (id) => document.getElementById(id);

function showTabs() {
  for (const button of document.querySelectorAll('[data-show]')) {
    const isShown = document.body.dataset.view === button.dataset.show;
    button.setAttribute('aria-pressed', String(isShown));
    button.onclick = () => { document.body.dataset.view = button.dataset.show; };
  }
}

function openSettings() {
  const dialog = at('tune-dialog');
  for (const field of dialog.querySelectorAll('[name]')) {
    field.value = chat.settingsOfOpen()[field.name] ?? '';
    check(field);
    field.oninput = () => check(field);
  }
  at('tune-default').checked = false;
  dialog.showModal();
}

/** Say what is wrong with a field; Done waits until nothing is. */
function check(field) {
  const problem = problemOf(field.name, field.value);
  field.setCustomValidity(problem);
  const note = field.parentElement.querySelector('.problem');
  if (note) note.textContent = problem;
}

/** Take over what was entered; Done has checked it, and Escape does not submit. */
function keepSettings() {
  const chosen = {};
  for (const field of at('tune-dialog').querySelectorAll('[name]')) {
    const isNumber = field.type === 'number';
    const value = isNumber ? field.valueAsNumber : field.value.trim();
    chosen[field.name] = Number.isNaN(value) ? null : value;
  }
  chat.keepSettings(chosen);
  if (!at('tune-default').checked) return;
  Object.assign(settings, chosen);
  saveSettings();
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

/** Show the name of the model, or the choice of models; keep the one that was chosen before. */
async function showModels() {
  try {
    const names = (await fetchModels()).map((model) => model.id);
    const isOne = names.length === 1;
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

function chooseModel() {
  settings.model = at('models').value;
  saveSettings();
  document.title = `${settings.model} – Ridgeline`;
  live.restart();
}

new MutationObserver(showTabs).observe(document.body, { attributeFilter: ['data-view'] });
showTabs();
at('tune-button').onclick = openSettings;
// Not onclose, which waits for the next frame: a tab that goes to the background has none.
at('tune-dialog').querySelector('form').onsubmit = keepSettings;
at('export').onclick = exportAll;
at('import').onclick = () => at('import-file').click();
at('import-file').onchange = importChosen;
chat.start();
at('models').onchange = chooseModel;
await showModels();
live.start();
