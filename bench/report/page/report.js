"use strict";
// Sorting, filters, columns and details of the report. What comes from a record is only ever set as text.
(() => {
  const form = document.getElementById("filters");
  const status = document.getElementById("count");
  const runs = [...document.querySelectorAll("tr.run")];
  const main = document.querySelector("main");
  let data = null;

  function make(name, text, ...children) {
    const element = document.createElement(name);
    if (text !== null) element.textContent = text;
    element.append(...children);
    return element;
  }

  // ------------------------------------------------------------------------------------------------- filters

  function filter() {
    const selects = [...form.querySelectorAll("select")].filter((select) => select.value);
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const invalid = form.elements.invalid.checked;
    const shown = new Set();
    for (const row of runs) {
      const keep =
        selects.every((select) => row.dataset[select.name] === select.value) &&
        (invalid || !row.classList.contains("invalid")) &&
        words.every((word) => row.dataset.words.includes(word));
      row.hidden = !keep;
      if (row.details) row.details.hidden = !keep || !opened(row);
      if (keep) shown.add(row.id);
    }
    for (const group of document.querySelectorAll("section.group")) {
      group.hidden = !group.querySelector("tr.run:not([hidden])");
      if (selects.length || words.length) group.firstElementChild.open = true;
    }
    status.textContent = `${shown.size} of ${runs.length} runs shown`;
    charts.filter((run) => shown.has(run));
  }

  function columns() {
    const boxes = [...form.querySelectorAll(".columns input")];
    main.dataset.hidden = boxes.filter((box) => !box.checked).map((box) => box.value).join(" ");
  }

  // ------------------------------------------------------------------------------------------------- sorting

  function key(row, place) {
    const value = row.cells[place].dataset.value;
    return value === undefined ? row.cells[place].textContent.trim() : value === "" ? null : Number(value);
  }

  function compare(a, b) {
    return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  }

  function sort(heading) {
    const table = heading.closest("table");
    const up = heading.ariaSort === "none" ? heading.dataset.first === "ascending" : heading.ariaSort === "descending";
    for (const other of table.tHead.rows[0].cells) if (other.ariaSort) other.ariaSort = "none";
    heading.ariaSort = up ? "ascending" : "descending";
    const rows = [...table.tBodies[0].querySelectorAll("tr.run")];
    const last = (row) => 2 * row.classList.contains("invalid") + row.classList.contains("unranked"); // whatever the order
    const sorted = rows
      .map((row) => ({ row, key: key(row, heading.cellIndex) }))
      .sort((a, b) => {
        if (last(a.row) !== last(b.row)) return last(a.row) - last(b.row);
        if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
        return (up ? 1 : -1) * compare(a.key, b.key) || a.row.dataset.place - b.row.dataset.place;
      });
    table.tBodies[0].append(...sorted.flatMap(({ row }) => (row.details ? [row, row.details] : [row])));
  }

  // ------------------------------------------------------------------------------------------------- details

  const opened = (row) => row.cells[0].firstElementChild.ariaExpanded === "true";

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

  function toggle(row, button) {
    if (!row.details) {
      data ??= JSON.parse(document.getElementById("details-data").textContent);
      const cell = make("td", null, describe(data[row.id]));
      cell.colSpan = row.cells.length;
      row.details = make("tr", null, cell);
      row.details.className = "detail";
      row.details.id = `${row.id}-details`;
      row.after(row.details);
      button.setAttribute("aria-controls", row.details.id);
      button.ariaExpanded = "false";
    }
    button.ariaExpanded = String(!opened(row));
    row.details.hidden = !opened(row);
  }

  // What a link leads to may be in a folded table.
  function reveal() {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (!target) return;
    const fold = target.closest("details") ?? target.querySelector("details");
    if (fold) fold.open = true;
    target.scrollIntoView({ block: target.matches("tr") ? "center" : "start" });
  }

  // ------------------------------------------------------------------------------------------------- wiring

  for (const heading of document.querySelectorAll("th[data-first]")) {
    const button = make("button", heading.textContent);
    button.type = "button";
    heading.replaceChildren(button);
    heading.ariaSort = "none";
    button.addEventListener("click", () => sort(heading));
  }
  for (const row of runs) {
    const button = make("button", null);
    button.className = "more";
    button.type = "button";
    button.ariaExpanded = "false";
    button.ariaLabel = `details of ${row.dataset.name}`;
    row.cells[0].replaceChildren(button);
    button.addEventListener("click", () => toggle(row, button));
    const id = row.querySelector("td.c-run code");
    id.after(" ", copier(id.title, `the id of ${row.dataset.name}`));
  }
  const phone = matchMedia("(max-width: 600px)").matches;
  for (const box of form.querySelectorAll(".columns input")) {
    if (phone) box.checked = box.defaultChecked = "phone" in box.dataset;
    box.addEventListener("change", columns);
  }
  for (const event of ["input", "change"]) form.addEventListener(event, filter);
  form.addEventListener("reset", () => setTimeout(() => { filter(); columns(); }));
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", reveal);
  form.hidden = false;
  columns(); // a reload keeps the boxes as they were
  filter();
  reveal();
})();
