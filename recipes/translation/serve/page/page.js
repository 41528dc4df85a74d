// The page: what is typed is translated line by line, by every model of the chosen languages.

import { Panel, pairOf, titleOf } from "./view.js";

const PAUSE = 250; // milliseconds without a key before a translation is asked for
const AT_ONCE = 16; // lines of one request: a long text is shown as it is translated
const MOST = 5; // translations of the line with the cursor
const KEPT = 2000; // lines whose translations are remembered, for each model
const NAMED = 10; // lines without a translation that are named
const OF_A_LINE = [413, 500]; // statuses of a request that may be due to one of its lines

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
    throw Object.assign(new Error(answer.error), { status: response.status });
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
      await this.ask([focus], this.details, { n_best: this.most, links: true }, signal);
      show();
    }
    const missing = [...new Set(lines)].filter((line) => line.trim() && !this.known(line));
    for (let start = 0; start < missing.length; start += AT_ONCE) {
      await this.ask(missing.slice(start, start + AT_ONCE), this.plain, {}, signal);
      show();
    }
  }

  async ask(lines, kept, options, signal) {
    for (const [index, found] of (await this.found(lines, options, signal)).entries()) {
      kept.set(lines[index], found);
    }
    for (const line of kept.keys()) {
      if (kept.size <= KEPT) {
        break;
      }
      kept.delete(line);
    }
  }

  /** Return what was found for each line; where a request fails, that of each half, so that a line fails alone. */
  async found(lines, options, signal) {
    try {
      const answer = await answerOf("/lines", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ model: this.number, lines, ...options }),
        signal,
      });
      return answer.lines;
    } catch (error) {
      if (!OF_A_LINE.includes(error.status)) {
        throw error;
      }
      if (lines.length === 1) {
        return [{ error: `cannot be translated: ${error.message}` }];
      }
      const half = Math.ceil(lines.length / 2);
      const first = await this.found(lines.slice(0, half), options, signal);
      return first.concat(await this.found(lines.slice(half), options, signal));
    }
  }

  /** Return what to say of lines that cannot be translated: why not the first, and which others. */
  refusal(lines) {
    const bad = lines.map((line, index) => [index + 1, this.known(line)?.error]).filter(([, error]) => error);
    const [first, ...others] = bad;
    if (!first) {
      return "";
    }
    const numbers = others.slice(0, NAMED).map(([number]) => number).join(", ") + (others.length > NAMED ? ", …" : "");
    const also = others.length ? ` (also ${others.length > 1 ? "lines" : "line"} ${numbers})` : "";
    return `line ${first[0]} ${first[1]}${also}`;
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
    const refusal = panel.translator.refusal(lines);
    panel.fail(refusal);
    return refusal !== "";
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
  const chosen = models.filter((model) => pairOf(model) === name);
  panels = chosen.map((model) => new Panel(model, new Translator(model.number, model), source));
  document.getElementById("models").replaceChildren(...panels.map((panel) => panel.element));
  update();
}

async function begin() {
  const found = await answerOf("/models");
  const runs = found.map((model) => model.name);
  const models = found.map((model, number) => ({ ...model, number, title: titleOf(model.name, runs) }));
  const names = [...new Set(models.map(pairOf))];
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
