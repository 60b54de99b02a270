"use strict";
// Rows, sorting, filters, columns and details of the report. What comes from a record is set as text, but for the rows,
// which are markup that html.py has escaped.
(async () => {
  const form = document.getElementById("filters");
  const status = document.getElementById("count");
  const main = document.querySelector("main");
  const found = new Map([...document.querySelectorAll("tr.run")].map((row) => [row.id, row])); // rows made so far, by id
  const { filters, tables: listed, step, details: together } = await unpack("index-data");
  const blocks = new Map(); // of packed data, those that were asked for
  const INVALID = 2; // the kind of a run

  const tables = listed.map((rows, place) => {
    const section = document.getElementById(`table-${place}`);
    const runs = rows.map(([id, kind, name, words, facts, values], order) =>
      ({ id, kind, name, words, facts, values, order, keep: true }));
    return { place, section, fold: section.firstElementChild, body: section.querySelector("tbody"), runs, limit: step, turn: 0 };
  });
  const count = tables.reduce((sum, table) => sum + table.runs.length, 0);

  function block(id) {
    if (!blocks.has(id)) blocks.set(id, unpack(id));
    return blocks.get(id);
  }

  function make(name, text, ...children) {
    const element = document.createElement(name);
    if (text !== null) element.textContent = text;
    element.append(...children);
    return element;
  }

  // ------------------------------------------------------------------------------------------------- filters

  function filter() {
    const chosen = filters.map((name) => form.elements[name].value);
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const invalid = form.elements.invalid.checked;
    const shown = new Set();
    for (const table of tables) {
      for (const run of table.runs) {
        run.keep =
          chosen.every((value, place) => !value || run.facts[place] === value) &&
          (invalid || run.kind !== INVALID) &&
          words.every((word) => run.words.includes(word));
        if (run.keep) shown.add(run.id);
      }
      table.section.hidden = !table.runs.some((run) => run.keep);
      table.limit = step;
      if (words.length || chosen.some(Boolean)) table.fold.open = true;
      show(table);
    }
    status.textContent = `${shown.size} of ${count} runs shown`;
    charts.then((drawn) => drawn.filter((run) => shown.has(run)));
  }

  function columns() {
    const boxes = [...form.querySelectorAll(".columns input")];
    main.dataset.hidden = boxes.filter((box) => !box.checked).map((box) => box.value).join(" ");
  }

  // ---------------------------------------------------------------------------------------------------- rows

  /** Puts the first runs of the table that pass the filters into it, if it is open. */
  async function show(table) {
    const turn = ++table.turn;
    if (!table.fold.open) return;
    const kept = table.runs.filter((run) => run.keep);
    const runs = kept.slice(0, table.limit);
    if (runs.some((run) => !found.has(run.id))) {
      const markup = await block(`rows-${table.place}`);
      if (turn !== table.turn) return; // it was sorted or filtered in the meantime
      for (const run of runs) if (!found.has(run.id)) found.set(run.id, row(markup[run.id], run));
    }
    const rows = runs.map((run) => found.get(run.id));
    table.body.replaceChildren(...rows.flatMap((each) => (each.details ? [each, each.details] : [each])));
    more(table, runs.length, kept.length);
  }

  function row(markup, run) {
    const template = document.createElement("template");
    template.innerHTML = markup;
    return wire(template.content.firstElementChild, run);
  }

  function wire(row, run) {
    const button = make("button", null);
    button.className = "more";
    button.type = "button";
    button.ariaExpanded = "false";
    button.ariaLabel = `details of ${run.name}`;
    row.cells[0].replaceChildren(button);
    button.addEventListener("click", () => toggle(row, button));
    const id = row.querySelector("td.c-run code");
    id.after(" ", copier(id.title, `the id of ${run.name}`));
    return row;
  }

  /** The line below a table of which not all runs are shown. */
  function more(table, shown, all) {
    table.rest?.remove();
    if (shown === all) return;
    const add = (text, limit) => {
      const button = make("button", text);
      button.type = "button";
      button.addEventListener("click", async () => {
        table.limit = limit;
        await show(table);
        table.rest.querySelector("button")?.focus(); // this one is gone
      });
      return button;
    };
    table.rest = make("p", `The first ${shown} of ${all} runs. `, add(`show ${Math.min(step, all - shown)} more`, table.limit + step));
    if (all - shown > step) table.rest.append(" ", add("show all", all));
    table.rest.className = "rest";
    table.fold.append(table.rest);
  }

  // ------------------------------------------------------------------------------------------------- sorting

  const { compare: alphabetically } = new Intl.Collator();

  function compare(a, b) {
    return typeof a === "number" && typeof b === "number" ? a - b : alphabetically(String(a), String(b));
  }

  function sort(table, heading) {
    const up = heading.ariaSort === "none" ? heading.dataset.first === "ascending" : heading.ariaSort === "descending";
    for (const other of heading.parentElement.cells) if (other.ariaSort) other.ariaSort = "none";
    heading.ariaSort = up ? "ascending" : "descending";
    const place = heading.cellIndex - 1;
    table.runs.sort((a, b) => {
      if (a.kind !== b.kind) return a.kind - b.kind; // whatever the order
      const [x, y] = [a.values[place], b.values[place]];
      if (x === null || y === null) return (x === null) - (y === null) || a.order - b.order;
      return (up ? 1 : -1) * compare(x, y) || a.order - b.order;
    });
    show(table);
  }

  // ------------------------------------------------------------------------------------------------- details

  const list = (facts) =>
    make("dl", null, ...facts.flatMap(([name, text]) => [make("dt", name), make("dd", text)]));

  function table(head, rows) {
    const line = (cells, kind) => make("tr", null, ...cells.map((text) => make(kind, text)));
    return make("table", null, make("thead", null, line(head, "th")), make("tbody", null, ...rows.map((row) => line(row, "td"))));
  }

  function fold(title, ...children) {
    return make("details", null, make("summary", title), ...children);
  }

  function copier(text, what) {
    const button = make("button", "copy");
    button.type = "button";
    button.className = "copy";
    button.ariaLabel = `copy ${what}`;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "copied";
      } catch {
        button.textContent = "select it"; // the browser lets no page write to the clipboard
      }
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
    return button;
  }

  function samples(found) {
    return found.flatMap((sample) => [
      make("h4", `${sample.prompt} (${sample.category})`),
      ...Object.entries(sample.arms).flatMap(([arm, text]) => [make("p", arm), make("pre", text)]),
    ]);
  }

  function describe(run) {
    const part = (title, ...children) => make("div", null, make("h3", title), ...children);
    const said = [...run.reasons.map((reason) => `INVALID: ${reason}`), ...run.warnings.map((line) => `Warning: ${line}`)];
    const repeat = run.command
      ? [make("pre", run.command), copier(run.command, "the command")]
      : [make("p", "not known: it has no config.yaml, or conf/ does not have its method")];
    return make("div", null, ...said.map((line) => make("p", line)), part("Run it again", ...repeat), parts(run, part));
  }

  function parts(run, part) {
    const grid = make("div", null);
    grid.className = "parts";
    grid.append(
      part("Numbers", list(run.numbers)),
      part("Agreement with the target", run.agreement.length ? list(run.agreement) : make("p", "not measured")),
    );
    if (run.categories.length > 1) {
      grid.append(part("Categories", table(["category", "speed-up", "95 %", "n"], run.categories)));
    }
    grid.append(
      part("Samples", ...(run.samples.length ? [fold("show", ...samples(run.samples))] : [make("p", "not kept")])),
      part("Manifest", fold("show", list(run.manifest))),
    );
    grid.lastElementChild.className = "wide";
    return grid;
  }

  /** One run of a block, in which manifests are kept by name. */
  function unpacked({ runs, names, manifests }, place) {
    const manifest = names.map((name, at) => [name, manifests[at][place]]).filter(([, value]) => value !== null);
    return { ...runs[place], manifest };
  }

  function toggle(row, button) {
    if (!row.details) {
      const number = Number(row.id.slice("run-".length));
      const cell = make("td", null);
      cell.colSpan = row.cells.length;
      row.details = make("tr", null, cell);
      row.details.className = "detail";
      row.details.id = `${row.id}-details`;
      row.details.hidden = true;
      row.after(row.details);
      button.setAttribute("aria-controls", row.details.id);
      block(`details-${Math.floor(number / together)}`).then((packed) => cell.append(describe(unpacked(packed, number % together))));
    }
    row.details.hidden = !row.details.hidden;
    button.ariaExpanded = String(!row.details.hidden);
  }

  /** Shows what a link leads to: a table that may be folded, or a run that may not be in the page yet. */
  async function reveal() {
    const id = location.hash.slice(1);
    const table = tables.find((each) => each.section.id === id || each.runs.some((run) => run.id === id));
    if (!table) return;
    table.fold.open = true;
    const place = table.runs.filter((run) => run.keep).findIndex((run) => run.id === id);
    table.limit = Math.max(table.limit, place + 1);
    await show(table);
    document.querySelector("tr.target")?.classList.remove("target");
    const target = document.getElementById(id);
    target?.classList.toggle("target", target.matches("tr"));
    target?.scrollIntoView({ block: target.matches("tr") ? "center" : "start" });
  }

  // ------------------------------------------------------------------------------------------------- wiring

  for (const table of tables) {
    for (const run of table.runs) if (found.has(run.id)) wire(found.get(run.id), run);
    table.fold.addEventListener("toggle", () => show(table));
    for (const heading of table.section.querySelectorAll("th[data-first]")) {
      const button = make("button", heading.textContent);
      button.type = "button";
      heading.replaceChildren(button);
      heading.ariaSort = "none";
      button.addEventListener("click", () => sort(table, heading));
    }
  }
  const phone = matchMedia("(max-width: 600px)").matches;
  for (const box of form.querySelectorAll(".columns input")) {
    if (phone) box.checked = box.defaultChecked = "phone" in box.dataset;
    box.addEventListener("change", columns);
  }
  const typed = (event) => event.target.name === "text";
  form.addEventListener("input", (event) => typed(event) && filter());
  form.addEventListener("change", (event) => event.target.name && !typed(event) && filter()); // columns have no name
  form.addEventListener("reset", () => setTimeout(() => { filter(); columns(); }));
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", reveal);
  form.hidden = false;
  columns(); // a reload keeps the boxes as they were
  filter();
  reveal();
})();
