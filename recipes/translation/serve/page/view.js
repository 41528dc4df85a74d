// What a model's panel shows. Text from anywhere is put into the page as text, never as HTML.

/** Return a new element with a text. */
function made(tag, text, name) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (name) {
    element.className = name;
  }
  return element;
}

const LANGUAGES = new Intl.DisplayNames(["en"], { type: "language" });

/** Return a language's English name; of what is no code of a language, itself. */
function languageOf(code) {
  try {
    return LANGUAGES.of(code);
  } catch {
    return code;
  }
}

export function pairOf(model) {
  return `${languageOf(model.source)} to ${languageOf(model.target)}`;
}

/** Return what a run is called among others: the last part of its path, or as many as tell it from theirs. */
export function titleOf(name, names) {
  const end = (path, count) => path.split("/").filter(Boolean).slice(-count).join("/");
  const others = names.filter((other) => other !== name);
  let count = 1;
  while (end(name, count) !== end(name, count + 1) && others.some((other) => end(other, count) === end(name, count))) {
    count += 1;
  }
  return end(name, count);
}

/** The part of the page that belongs to one model. */
export class Panel {
  constructor(model, translator) {
    this.translator = translator;
    this.model = model;
    this.shown = null;
    this.element = document.getElementById("model").content.cloneNode(true).firstElementChild;
    this.find("h2").textContent = model.title;
    this.find("h2").title = model.name;
    this.find(".about").textContent = `${pairOf(model)}, ${model.engine}, beam ${model.beam}`;
    this.element.setAttribute("aria-label", `Model ${model.title}`);
    this.output = this.find(".output");
    this.output.lang = model.target;
    this.output.setAttribute("aria-label", `Translation by ${model.title}`);
    this.copy = this.find(".copy");
    this.copy.hidden = !navigator.clipboard; // as over http from another machine
    this.copy.addEventListener("click", () => this.copied());
    this.sides = [this.find(".words.source"), this.find(".words.target")];
    this.sides[0].lang = model.source;
    this.sides[1].lang = model.target;
    for (const side of this.sides) {
      side.addEventListener("keydown", (event) => move(side, event));
    }
  }

  find(selector) {
    return this.element.querySelector(selector);
  }

  /** Copy the translation of all lines. */
  async copied() {
    const text = [...this.output.children].map((row) => row.textContent).join("\n");
    try {
      await navigator.clipboard.writeText(text);
      this.copy.textContent = "Copied";
    } catch (error) {
      this.fail(`The translation cannot be copied: ${error.message}`);
    }
    setTimeout(() => (this.copy.textContent = "Copy"), 2000);
  }

  /** Show an error, or none. */
  fail(message) {
    const error = this.find(".error");
    error.textContent = message;
    error.hidden = !message;
  }

  /** Show the translations of all lines, and more about that with the cursor. */
  show(lines, place) {
    this.output.dataset.lines = lines.length;
    const rows = lines.map((line, index) => this.row(line, index, index === place));
    this.output.replaceChildren(...rows);
    const found = this.translator.details.get(lines[place]);
    this.showLine(found?.error ? undefined : found, place, lines.length);
  }

  /** Return a paragraph with a line's translation; one that is not known yet keeps what its place has shown. */
  row(line, index, isCurrent) {
    const found = this.translator.known(line);
    const row = made("p", "");
    row.dir = "auto";
    if (found?.error) {
      row.textContent = "–";
      row.classList.add("refused");
    } else if (found) {
      row.textContent = found.translations[0].text;
    } else if (line.trim()) {
      row.textContent = this.output.children[index]?.textContent || "…";
      row.classList.add("waiting");
    }
    row.classList.toggle("current", isCurrent);
    return row;
  }

  showLine(found, place, count) {
    this.find(".line").hidden = !found;
    this.find(".of-line").textContent = count > 1 ? `Line ${place + 1}` : "Words";
    // Left as it is, with the focus it may have, where the same is shown; equal lines differ in their number alone
    if (!found || found === this.shown) {
      return;
    }
    this.shown = found;
    const rows = found.translations.map((one, index) => {
      const row = document.createElement("tr");
      const text = made("td", one.text);
      text.lang = this.model.target;
      text.dir = "auto";
      row.append(
        made("td", index + 1),
        text,
        made("td", one.score.toFixed(3), "number"),
        made("td", one.log_probability.toFixed(3), "number"),
      );
      return row;
    });
    this.find("tbody").replaceChildren(...rows);
    this.find(".alignment").hidden = !found.links.length;
    this.showWords(found);
  }

  /** Show both sides' words; that which has the mouse or the focus marks the words that belong to it. */
  showWords(found) {
    const words = [found.source_words, found.target_words];
    const names = ["Words of the source", "Words of the translation"];
    const buttons = words.map((side) => side.map((word) => made("button", word)));
    for (const end of [0, 1]) {
      this.sides[end].setAttribute("aria-label", `${names[end]}: arrow keys move, and the aligned words are marked`);
      this.sides[end].replaceChildren(...buttons[end]);
      buttons[end].forEach((button, index) => {
        const partners = found.links.filter((link) => link[end] === index).map((link) => link[1 - end]);
        const texts = partners.map((partner) => words[1 - end][partner]);
        button.type = "button";
        button.tabIndex = index === 0 ? 0 : -1;
        button.setAttribute("aria-description", texts.length ? `aligned with ${texts.join(", ")}` : "not aligned");
        const mark = (on) => partners.forEach((partner) => buttons[1 - end][partner].classList.toggle("partner", on));
        button.addEventListener("focus", () => mark(true));
        button.addEventListener("blur", () => mark(false));
        button.addEventListener("mouseenter", () => mark(true));
        button.addEventListener("mouseleave", () => mark(document.activeElement === button));
      });
    }
  }
}

/** Move the focus among the words of a side: one of them can be reached by Tab, the others by arrow keys. */
function move(side, event) {
  const buttons = [...side.children];
  const here = buttons.indexOf(document.activeElement);
  const forward = getComputedStyle(side).direction === "rtl" ? -1 : 1;
  const places = {
    ArrowRight: here + forward,
    ArrowLeft: here - forward,
    ArrowDown: here + 1,
    ArrowUp: here - 1,
    Home: 0,
    End: buttons.length - 1,
  };
  const next = buttons[places[event.key]];
  if (!next || here < 0) {
    return;
  }
  event.preventDefault();
  buttons[here].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
