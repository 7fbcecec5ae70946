// The page: which of its parts a narrow screen shows, the model's name, the settings.

import { fetchModels } from './api.js';
import * as chat from './chat.js';
import * as live from './live.js';
import { problemOf } from './parts.js';
import { saveSettings, settings } from './store.js';

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
    field.value = settings[field.name] ?? '';
    check(field);
    field.oninput = () => check(field);
  }
  dialog.returnValue = '';
  dialog.showModal();
}

/** Say what is wrong with a field; Done waits until nothing is. */
function check(field) {
  const problem = problemOf(field.name, field.value);
  field.setCustomValidity(problem);
  const note = field.parentElement.querySelector('.problem');
  if (note) note.textContent = problem;
}

/** Take over what was entered; Done has checked it, Escape discards it. */
function keepSettings() {
  if (at('tune-dialog').returnValue !== 'ok') return;
  for (const field of at('tune-dialog').querySelectorAll('[name]')) {
    const isNumber = field.type === 'number';
    const value = isNumber ? field.valueAsNumber : field.value.trim();
    settings[field.name] = Number.isNaN(value) ? null : value;
  }
  saveSettings();
  chat.showHint();
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
at('tune-dialog').onclose = keepSettings;
chat.start();
at('models').onchange = chooseModel;
await showModels();
live.start();
