// The page: which of its parts a narrow screen shows, the model's name, the settings.

import { call } from './api.js';
import * as chat from './chat.js';
import * as live from './live.js';
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
  for (const field of dialog.querySelectorAll('[name]')) field.value = settings[field.name] ?? '';
  dialog.showModal();
}

function keepSettings() {
  for (const field of at('tune-dialog').querySelectorAll('[name]')) {
    const isNumber = field.type === 'number';
    const value = isNumber ? field.valueAsNumber : field.value.trim();
    settings[field.name] = Number.isNaN(value) ? null : value;
  }
  saveSettings();
  chat.showHint();
}

async function showModel() {
  try {
    const { data: [model] } = await (await call('/v1/models')).json();
    at('model').textContent = model.id;
    document.title = `${model.id} – Ridgeline`;
  } catch (error) {
    at('model').textContent = error.message;
  }
}

new MutationObserver(showTabs).observe(document.body, { attributeFilter: ['data-view'] });
showTabs();
at('tune-button').onclick = openSettings;
at('tune-dialog').onclose = keepSettings;
chat.start();
await showModel();
live.start();
