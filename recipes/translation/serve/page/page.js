// The page: what is typed is translated line by line, by every model of the chosen languages.

import { Panel } from "./view.js";

const PAUSE = 250; // milliseconds without a key before a translation is asked for
const AT_ONCE = 16; // lines of one request: a long text is shown as it is translated
const MOST = 5; // translations of the line with the cursor
const KEPT = 2000; // lines whose translations are remembered, for each model

const source = document.getElementById("source");
const status = document.getElementById("status");
const pair = document.getElementById("pair");

let panels = [];
let timer = 0;
let current = new AbortController();

async function answerOf(path, request) {
  const response = await fetch(path, request);
  const answer = await response.json().catch(() => ({ error: response.statusText }));
  if (!response.ok) {
    throw new Error(answer.error);
  }
  return answer;
}

/** Translates lines with one model, and remembers them. */
class Translator {
  constructor(number, model) {
    this.number = number;
    this.most = Math.min(MOST, model.beam);
    this.details = new Map();
    this.plain = new Map();
  }

  known(line) {
    return this.details.get(line) || this.plain.get(line);
  }

  /** Ask for lines that are not known, that at `place` first, some at a time, and call `show` after each request. */
  async translate(lines, place, signal, show) {
    const focus = lines[place];
    if (focus.trim() && !this.details.has(focus)) {
      await this.ask([focus], this.details, { numbers: [place + 1], n_best: this.most, links: true }, signal);
      show();
    }
    const missing = [...new Set(lines)].filter((line) => line.trim() && !this.known(line));
    for (let start = 0; start < missing.length; start += AT_ONCE) {
      const some = missing.slice(start, start + AT_ONCE);
      const numbers = some.map((line) => lines.indexOf(line) + 1); // an error calls a line by its place in the text
      await this.ask(some, this.plain, { numbers }, signal);
      show();
    }
  }

  async ask(lines, kept, options, signal) {
    const answer = await answerOf("/lines", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ model: this.number, lines, ...options }),
      signal,
    });
    answer.lines.forEach((found, index) => kept.set(lines[index], found));
    for (const line of kept.keys()) {
      if (kept.size <= KEPT) {
        break;
      }
      kept.delete(line);
    }
  }
}

function linesOf(text) {
  return text.split(/\r?\n/);
}

/** Show what is known, and ask for what is not. */
async function update() {
  current.abort();
  current = new AbortController();
  const signal = current.signal;
  const lines = linesOf(source.value);
  const place = linesOf(source.value.slice(0, source.selectionEnd)).length - 1;
  const start = performance.now();
  const failures = await Promise.all(panels.map((panel) => updatePanel(panel, lines, place, signal)));
  if (signal.aborted) {
    return;
  }
  const seconds = ((performance.now() - start) / 1000).toFixed(1);
  if (failures.some((failed) => failed)) {
    status.textContent = "Not everything was translated.";
  } else if (source.value.trim()) {
    status.textContent = `Translated in ${seconds} seconds.`;
  } else {
    status.textContent = "";
  }
}

async function updatePanel(panel, lines, place, signal) {
  const show = () => panel.show(lines, place);
  show();
  try {
    await panel.translator.translate(lines, place, signal, show);
    panel.fail("");
    return false;
  } catch (error) {
    if (signal.aborted) {
      return false;
    }
    panel.fail(error.message);
    return true;
  }
}

/** Give up what was asked for, and ask anew after a pause. */
function later() {
  current.abort();
  clearTimeout(timer);
  status.textContent = "Translating…";
  timer = setTimeout(update, PAUSE);
}

function choose(models, name) {
  const chosen = models.filter((model) => nameOf(model) === name);
  panels = chosen.map((model) => new Panel(model, new Translator(model.number, model), source));
  document.getElementById("models").replaceChildren(...panels.map((panel) => panel.element));
  update();
}

function nameOf(model) {
  return `${model.source} to ${model.target}`;
}

async function begin() {
  const found = await answerOf("/models");
  const models = found.map((model, number) => ({ ...model, number }));
  const names = [...new Set(models.map(nameOf))];
  for (const name of names) {
    pair.add(new Option(name));
  }
  document.getElementById("pair-choice").hidden = names.length === 1;
  if (names.length === 1) {
    document.getElementById("pair-name").textContent = names[0];
  }
  choose(models, names[0]);
  pair.addEventListener("change", () => choose(models, pair.value));
  source.addEventListener("input", later);
  let before = -1;
  document.addEventListener("selectionchange", () => {
    const place = linesOf(source.value.slice(0, source.selectionEnd)).length;
    if (place !== before) {
      before = place;
      later();
    }
  });
}

begin().catch((error) => {
  status.textContent = error.message;
});
