"use strict";
// Sorting, filters and details of the report. What comes from a record is only ever set as text.
(() => {
  const form = document.getElementById("filters");
  const status = document.getElementById("count");
  const runs = [...document.querySelectorAll("tr.run")];
  const points = new Map();
  for (const point of document.querySelectorAll("[data-run]")) {
    points.set(point.dataset.run, [...(points.get(point.dataset.run) ?? []), point]);
  }
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
    let shown = 0;
    for (const row of runs) {
      const keep =
        selects.every((select) => row.dataset[select.name] === select.value) &&
        (invalid || !row.classList.contains("invalid")) &&
        words.every((word) => row.dataset.words.includes(word));
      row.hidden = !keep;
      if (row.details) row.details.hidden = !keep || !opened(row);
      for (const point of points.get(row.id) ?? []) point.classList.toggle("gone", !keep);
      shown += keep;
    }
    for (const group of document.querySelectorAll("section.group")) {
      group.hidden = !group.querySelector("tr.run:not([hidden])");
    }
    status.textContent = `${shown} of ${runs.length} runs shown`;
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
    const last = (row) => Number(row.classList.contains("invalid")); // never ranked, in whatever order
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

  function list(facts) {
    const entries = Object.entries(facts).flatMap(([name, value]) => [
      make("dt", name),
      make("dd", value === null ? "not measured" : typeof value === "object" ? JSON.stringify(value) : String(value)),
    ]);
    return make("dl", null, ...entries);
  }

  function samples(found) {
    return found.flatMap((sample) => [
      make("h4", `${sample.prompt} (${sample.category})`),
      ...Object.entries(sample.arms).flatMap(([arm, text]) => [make("p", arm), make("pre", text)]),
    ]);
  }

  function describe(run) {
    const part = (title, ...children) => make("div", null, make("h3", title), ...children);
    const said = [...run.reasons.map((reason) => `INVALID: ${reason}`), ...run.warnings];
    const lines = said.map((line) => make("p", line));
    return make("div", null, ...lines, part("Command", make("pre", run.command)), parts(run, part));
  }

  function parts(run, part) {
    const grid = make("div", null);
    grid.className = "parts";
    grid.append(
      part("Agreement with the target", run.agreement ? list(run.agreement) : make("p", "not measured")),
      part("Numbers", list(run.numbers)),
      part("Samples", ...(run.samples.length ? samples(run.samples) : [make("p", "not kept")])),
      part("Manifest", make("pre", JSON.stringify(run.manifest, null, 1))),
    );
    return grid;
  }

  function toggle(row, button) {
    if (!row.details) {
      data ??= JSON.parse(document.getElementById("data").textContent);
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

  // ------------------------------------------------------------------------------------------------- wiring

  for (const heading of document.querySelectorAll("th[data-first]")) {
    const button = make("button", heading.textContent);
    button.type = "button";
    heading.replaceChildren(button);
    heading.ariaSort = "none";
    button.addEventListener("click", () => sort(heading));
  }
  for (const row of runs) {
    const button = make("button", "more");
    button.type = "button";
    button.ariaExpanded = "false";
    button.ariaLabel = `details of ${row.dataset.name}`;
    row.cells[0].replaceChildren(button);
    button.addEventListener("click", () => toggle(row, button));
  }
  for (const event of ["input", "change"]) form.addEventListener(event, filter);
  form.addEventListener("reset", () => setTimeout(filter));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  filter();
})();
