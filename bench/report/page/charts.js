"use strict";
// The charts of the report, with d3 and Observable Plot. What comes from a record is only ever set as text.
const charts = (async () => {
  const data = await unpack("charts-data");
  const section = document.getElementById("charts");
  const NARROW = 560; // pixels; below, labels are put above the marks
  const MOST = 60; // runs of a chart with a line for each, and labels of the others
  const RATIOS = [0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16, 24, 32];
  let keep = () => true; // whether a run passes the filters

  // --------------------------------------------------------------------------------------------------- marks

  function polygon(corners, turn, inner = 1) {
    const count = inner === 1 ? corners : 2 * corners;
    return {
      draw(context, size) {
        for (let i = 0; i < count; i++) {
          const radius = Math.sqrt(size / 2.4) * (i % 2 ? inner : 1);
          const angle = turn + (2 * Math.PI * i) / count - Math.PI / 2;
          context[i ? "lineTo" : "moveTo"](radius * Math.cos(angle), radius * Math.sin(angle));
        }
        context.closePath();
      },
    };
  }
  const turned = Math.PI / 4;
  const MARKS = new Map(Object.entries({ // the letters of bench.report.style
    o: "circle", s: polygon(4, turned), D: polygon(4, 0), d: polygon(2, 0, 0.55), p: polygon(5, 0), h: polygon(6, 0),
    H: polygon(6, Math.PI / 6), 8: polygon(8, Math.PI / 8), "^": polygon(3, 0), v: polygon(3, Math.PI),
    "<": polygon(3, -Math.PI / 2), ">": polygon(3, Math.PI / 2), "*": polygon(5, 0, 0.45), P: "cross",
    X: polygon(4, turned, 0.4), 1: polygon(3, Math.PI, 0.3),
    2: polygon(3, 0, 0.3), 3: polygon(3, -Math.PI / 2, 0.3), 4: polygon(3, Math.PI / 2, 0.3), x: polygon(4, turned, 0.15),
  }));
  const GLYPHS = { o: "\u25cf", s: "\u25a0", "^": "\u25b2", D: "\u25c6", v: "\u25bc" };
  const colour = (row) => data.colours[row.family] ?? data.colours.other;
  const fill = (row) => (row.guarantee === "EXACT" ? colour(row) : "var(--page)"); // hollow: the text may change
  const name = (row) => row.label + (row.source === "own" ? " (own)" : "");
  const short = (text, most = 38) => (text.length > most ? `${text.slice(0, most - 1)}\u2026` : text);
  const times = (value) => `${value.toFixed(2)}\u00d7`;
  const span = (row) => (row.low === null ? "no interval" : `95 % ${row.low.toFixed(2)}\u2013${row.high.toFixed(2)}`);

  function title(row) {
    const facts = [`${times(row.value)}, ${span(row)}`, `${row.family}, ${row.guarantee}, ${row.source}`];
    if (row.steps !== null) facts.push(`${row.steps.toFixed(2)} tokens per step`);
    if (row.novel !== null) facts.push(`${times(row.novel)} on novel text`);
    if (row.worst !== null) facts.push(`${times(row.worst)} on the slowest prompt`);
    if (row.quality != null) facts.push(`quality ${row.quality.toFixed(1)}`);
    if (row.rank === null) facts.push(`not ranked: ${row.reason}`);
    return [name(row), ...facts].join("\n");
  }

  const dots = (rows, place) =>
    Plot.dot(rows, {
      ...place, r: 5, symbol: (row) => MARKS.get(row.mark) ?? "circle", fill, stroke: colour, strokeWidth: 1.8,
      href: (row) => `#${row.run}`,
    });
  const tips = (rows, place, pointer = Plot.pointer) => Plot.tip(rows, pointer({ ...place, title }));
  const labels = (rows, place, text = name) =>
    Plot.text(rows.slice(0, MOST), { ...place, text, className: "labels", fill: "currentColor", stroke: "var(--page)", strokeWidth: 3 });

  // --------------------------------------------------------------------------------------------------- scales

  function ratios(values, width, label) {
    const low = Math.min(0.9, ...values) * 0.95;
    const high = Math.max(1.1, ...values) * 1.08;
    const apart = (44 * Math.log(high / low)) / width; // pixels of a label, on the axis
    const ticks = [1];
    for (const tick of RATIOS.filter((value) => value >= low && value <= high)) {
      if (ticks.every((other) => Math.abs(Math.log(tick / other)) > apart)) ticks.push(tick);
    }
    return { type: "log", domain: [low, high], ticks, tickFormat: (tick) => `${tick}\u00d7`, label, grid: true, clamp: true };
  }

  // An interval far wider than the values would squeeze all of them; it is cut at the axis.
  function ends(rows) {
    const values = rows.map((row) => row.value);
    const [low, high] = [Math.min(...values) / 1.6, Math.max(...values) * 1.6];
    return rows.flatMap((row) => [Math.max(row.low ?? row.value, low), Math.min(row.high ?? row.value, high)]);
  }

  const margin = (rows) => Math.min(260, 14 + 6.6 * Math.max(...rows.map((row) => name(row).length)));
  const plain = (value) => (value >= 1000 ? value.toLocaleString("en") : String(+value.toPrecision(3)));
  const draw = (width, options) =>
    Plot.plot({ className: "chart", width, ...options });

  // --------------------------------------------------------------------------------------------------- charts

  function speedups(table, rows, width) {
    const narrow = width < NARROW;
    const left = narrow ? 12 : margin(rows);
    const x = ratios(ends(rows), width - left - 48, "speed-up over the baseline, with 95 % interval \u2192");
    const [from, to] = x.domain;
    const place = { x: "value", y: name };
    return draw(width, {
      height: rows.length * (narrow ? 34 : 22) + 64, marginTop: narrow ? 30 : 20, marginRight: 48, marginBottom: 40,
      marginLeft: left, x: { ...x, axis: "bottom" },
      y: { domain: rows.map(name), label: null, axis: narrow ? null : "left", tickSize: 0, tickFormat: (label) => short(label) },
      ariaLabel: `Speed-up of each run, ${table.heading}; the values are in the table`,
      marks: [
        Plot.barX(rows, { x1: 1, x2: "value", y: name, fill: colour, fillOpacity: 0.16, insetTop: 3, insetBottom: 3 }),
        Plot.ruleX([1], { stroke: "var(--soft)", strokeDasharray: "3 3" }),
        Plot.ruleY(rows, {
          y: name, x1: (row) => Math.max(from, row.low ?? row.value), x2: (row) => Math.min(to, row.high ?? row.value),
          stroke: colour, strokeWidth: 2.5,
        }),
        dots(rows, place),
        Plot.text(rows, {
          x: (row) => Math.min(to, row.high ?? row.value), y: name, text: (row) => times(row.value), dx: 7,
          textAnchor: "start", fill: "currentColor", stroke: "var(--page)", strokeWidth: 3,
        }),
        ...(narrow ? [Plot.text(rows, {
          x: from, y: name, text: name, dy: -13, textAnchor: "start", fill: "currentColor", stroke: "var(--page)", strokeWidth: 3,
        })] : []),
        tips(rows, place, Plot.pointerY),
      ],
    });
  }

  function quality(table, all, width) {
    const rows = all.filter((row) => row.quality !== null);
    const start = table.before === null ? [] : [{ x: 1, y: table.before }];
    const best = (row) => rows.every((other) => other === row || other.value <= row.value || other.quality < row.quality);
    const front = rows.filter(best).sort((a, b) => a.value - b.value);
    const place = { x: "value", y: "quality" };
    return draw(width, {
      height: 400, marginBottom: 40, marginRight: 24, marginTop: 28,
      x: ratios(rows.map((row) => row.value), width, "speed-up over the baseline \u2192"),
      y: { label: `\u2191 ${table.metric}`, grid: true, nice: true, inset: 12 },
      ariaLabel: `${table.metric} against speed-up, ${table.heading}; the values are in the table`,
      marks: [
        Plot.line(front, { ...place, curve: "step-before", stroke: "var(--soft)", strokeWidth: 1 }),
        Plot.dot(start, { x: "x", y: "y", symbol: "times", stroke: "var(--soft)", strokeWidth: 2, r: 5 }),
        dots(rows, place),
        labels([...front, ...rows.filter((row) => !front.includes(row))], place),
        labels(start, { x: "x", y: "y" }, () => "baseline"),
        tips(rows, place),
      ],
    });
  }

  function steps(table, all, width) {
    const rows = all.filter((row) => row.steps !== null);
    const place = { x: "steps", y: "value" };
    return draw(width, {
      height: 400, marginBottom: 40, marginLeft: 48, marginRight: 24, marginTop: 28,
      x: { label: "output tokens per pass of the target \u2192", grid: true, nice: true, inset: 12 },
      y: { ...ratios(rows.map((row) => row.value), 500, "\u2191 speed-up over the baseline") },
      ariaLabel: `Speed-up against tokens per step, ${table.heading}; the values are in the table`,
      marks: [
        Plot.ruleY([1], { stroke: "var(--soft)", strokeDasharray: "3 3" }),
        dots(rows, place), labels(rows, place), tips(rows, place),
      ],
    });
  }

  function novel(table, all, width) {
    const rows = all.filter((row) => row.novel !== null);
    const place = { x: "value", y: "novel" };
    const [from, to] = d3.extent(rows.flatMap((row) => [row.value, row.novel]));
    const equal = [from, to].map((end) => ({ value: end, novel: end }));
    return draw(width, {
      height: 400, marginBottom: 40, marginLeft: 48, marginRight: 24, marginTop: 28,
      x: ratios(rows.map((row) => row.value), width, "speed-up on all text \u2192"),
      y: ratios(rows.map((row) => row.novel), 500, "\u2191 speed-up on novel text"),
      ariaLabel: `Speed-up on novel text against all text, ${table.heading}; the values are in the table`,
      marks: [
        Plot.ruleY([1], { stroke: "var(--soft)", strokeDasharray: "3 3" }),
        Plot.line(equal, { ...place, stroke: "var(--soft)", strokeWidth: 1 }),
        dots(rows, place), labels(rows, place), tips(rows, place),
      ],
    });
  }

  function categories(table, rows, width) {
    const cells = rows.flatMap((row) =>
      Object.entries(row.categories).map(([category, [value, low, high, n]]) => ({ row, category, value, low, high, n })),
    );
    const counts = d3.rollup(cells, (found) => d3.extent(found, (cell) => cell.n), (cell) => cell.category);
    const heading = (category) => `${category}\nn = ${[...new Set(counts.get(category))].join("\u2013")}`;
    const reach = Math.max(Math.log(1.5), ...cells.map((cell) => Math.abs(Math.log(cell.value))));
    const left = margin(rows);
    const place = { x: "category", y: (cell) => name(cell.row) };
    return draw(Math.max(width, left + 74 * counts.size), {
      height: rows.length * 24 + 60, marginTop: 40, marginLeft: left, marginBottom: 8,
      x: { axis: "top", label: null, tickFormat: heading, tickSize: 0 },
      y: { domain: rows.map(name), label: null, tickSize: 0, tickFormat: (label) => short(label) },
      ariaLabel: `Speed-up by category of prompts, ${table.heading}`,
      marks: [
        Plot.cell(cells, {
          ...place, inset: 1, fill: (cell) => (cell.value >= 1 ? "var(--better)" : "var(--worse)"),
          fillOpacity: (cell) => 0.75 * Math.abs(Math.log(cell.value)) / reach,
        }),
        Plot.text(cells, { ...place, text: (cell) => cell.value.toFixed(2), fill: "currentColor" }),
        Plot.tip(cells, Plot.pointer({
          ...place, title: (cell) => `${name(cell.row)}\n${cell.category}: ${times(cell.value)}, ${span(cell)}, n = ${cell.n}`,
        })),
      ],
    });
  }

  function batches(series, rows, width) {
    const place = { x: "batch", y: "value" };
    const sizes = [...new Set(rows.map((row) => row.batch))].sort((a, b) => a - b);
    const doubtful = rows.filter((row) => row.result === "INCONCLUSIVE");
    const right = Math.min(width < NARROW ? 150 : 280, 24 + margin(rows));
    return draw(width, {
      height: 440, marginBottom: 40, marginTop: 28, marginLeft: 48, marginRight: right,
      x: { type: "log", base: 2, ticks: sizes, tickFormat: String, label: "batch size \u2192", labelAnchor: "center", inset: 10 },
      y: { ...ratios(rows.map((row) => row.value), 500, "\u2191 speed-up over the baseline") },
      ariaLabel: `Speed-up over batch size, ${series.heading}; the values are in the tables`,
      marks: [
        Plot.ruleY([1], { stroke: "var(--soft)", strokeDasharray: "3 3" }),
        Plot.line(rows, { ...place, z: "label", stroke: colour, strokeWidth: 1.5 }),
        Plot.ruleX(doubtful, { x: "batch", y1: "low", y2: "high", stroke: colour, strokeDasharray: "2 2" }),
        dots(rows, place),
        Plot.dot(doubtful, { ...place, r: 9, symbol: "times", stroke: "currentColor", strokeWidth: 1.5 }),
        Plot.text(rows, Plot.selectLast({
          ...place, z: "label", text: (row) => short(name(row), Math.floor((right - 28) / 6.3)), className: "ends",
          textAnchor: "start", dx: 24,
        })),
        tips(rows, place),
      ],
    });
  }

  // Where the advantage of each method ends: the largest batch size up to which every interval is above 1. A run without an
  // interval shows neither.
  function lasting(rows) {
    const known = rows.filter((row) => row.low !== null);
    const lines = d3.group(d3.sort(known, (row) => row.batch), name);
    const ends = [...lines].map(([label, line]) => {
      const lost = line.findIndex((row) => row.low <= 1);
      const last = lost < 0 ? line.at(-1) : line[lost - 1];
      return `${label} ${last ? last.batch : "none"}${lost < 0 ? " (the largest measured)" : ""}`;
    });
    return ends.join(", ");
  }

  // Batch sizes by colour, contexts by mark.
  function looks(roof) {
    const [batch, context] = ["batch", "context"].map((key) => [...new Set(roof.points.map((point) => point[key]))]);
    return { shades: d3.scaleOrdinal(batch, d3.schemeTableau10), marks: d3.scaleOrdinal(context, Object.keys(GLYPHS)) };
  }

  function roofline(roof, width) {
    const points = roof.points.map((point) => ({ ...point, line: `batch ${point.batch}, context ${point.context}` }));
    const [low, high] = d3.extent(points, (point) => point.intensity);
    const ridge = roof.flops / roof.bandwidth;
    const limit = [low / 2, ridge, Math.max(high, ridge) * 2].map((x) => ({ x, y: Math.min(x * roof.bandwidth, roof.flops) }));
    const { shades, marks } = looks(roof);
    const place = { x: "intensity", y: "rate" };
    const shade = (point) => shades(point.batch);
    return draw(width, {
      height: 400, marginBottom: 40, marginLeft: 52, marginRight: 24, marginTop: 28,
      x: { type: "log", label: "FLOPs per byte \u2192", tickFormat: plain, ticks: 6, grid: true },
      y: { type: "log", label: "\u2191 GFLOP/s", tickFormat: plain, ticks: 6, grid: true, inset: 12 },
      ariaLabel: `Roofline of ${roof.heading}: rate against FLOPs per byte`,
      marks: [
        Plot.line(limit, { x: "x", y: "y", stroke: "currentColor", strokeWidth: 1.5 }),
        Plot.text([limit[1]], { x: (ridge) => ridge.x / 2, y: (ridge) => ridge.y / 2, text: () => `${plain(roof.bandwidth)} GB/s`, dx: -8, textAnchor: "end", fill: "currentColor" }),
        Plot.text([limit[2]], { x: "x", y: "y", text: () => `${plain(roof.flops)} GFLOP/s`, dy: -10, textAnchor: "end", fill: "currentColor" }),
        Plot.line(points, { ...place, z: "line", stroke: shade, strokeWidth: 1 }),
        Plot.dot(points, { ...place, r: 4, symbol: (point) => MARKS.get(marks(point.context)), fill: shade }),
        labels(points, place, (point) => String(point.nodes)),
        Plot.tip(points, Plot.pointer({
          ...place, title: (point) => `${point.line}, ${point.nodes} nodes\n${plain(point.ms)} ms, ${plain(point.rate)} GFLOP/s`,
        })),
      ],
    });
  }

  // ----------------------------------------------------------------------------------------- labels in free places

  const overlap = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
  const PLACES = [[9, 0, "start"], [-9, 0, "end"], [0, -13, "middle"], [0, 13, "middle"], [9, -11, "start"], [9, 11, "start"],
    [-9, -11, "end"], [-9, 11, "end"], [0, -24, "middle"], [0, 24, "middle"]];

  // A label that fits nowhere is left out; pointing at its mark shows it.
  function arrange(svg) {
    const [width, height] = ["width", "height"].map((side) => Number(svg.getAttribute(side)));
    const fixed = "[aria-label=dot] path, [aria-label=dot] circle, [aria-label=text]:not(.labels) text";
    const taken = [...svg.querySelectorAll(fixed)].map((mark) => box(mark, svg));
    for (const text of svg.querySelectorAll(".labels text")) {
      const fits = PLACES.some(([dx, dy, anchor]) => {
        text.setAttribute("dx", dx);
        text.setAttribute("dy", dy + 4);
        text.setAttribute("text-anchor", anchor);
        const found = box(text, svg);
        const inside = found.x > 30 && found.y > 0 && found.x + found.width < width && found.y + found.height < height - 36;
        if (!inside || taken.some((other) => overlap(found, other))) return false;
        taken.push(found);
        return true;
      });
      if (!fits) text.remove();
    }
  }

  function box(element, svg) {
    const [own, all] = [element.getBoundingClientRect(), svg.getBoundingClientRect()];
    return { x: own.x - all.x, y: own.y - all.y, width: own.width, height: own.height };
  }

  // The names at the ends of lines, one above the other, each with a thread to its end.
  function spread(svg) {
    const texts = [...svg.querySelectorAll(".ends text")].map((text) => {
      const [x, y] = text.getAttribute("transform").match(/-?[\d.]+/g).map(Number);
      return { text, x, y, at: y };
    });
    texts.sort((a, b) => a.y - b.y);
    const bottom = Number(svg.getAttribute("height")) - 44;
    texts.forEach((each, place) => { if (place) each.at = Math.max(each.y, texts[place - 1].at + 13); });
    for (let place = texts.length - 1, limit = bottom; place >= 0; limit = texts[place--].at - 13) {
      texts[place].at = Math.min(texts[place].at, limit);
    }
    const edge = Math.max(...texts.map((each) => each.x));
    for (const { text, x, y, at } of texts) {
      text.setAttribute("transform", `translate(${edge},${at})`);
      const thread = d3.create("svg:path").attr("class", "thread").attr("d", `M${x - 17},${y}L${edge - 3},${at}`).node();
      text.parentNode.prepend(thread);
    }
  }

  // -------------------------------------------------------------------------------------------------- figures

  // title; what there is to choose from; which runs, and whether only the first; whether they are enough; the drawing; a
  // caption
  const enough = (of) => (_, rows) => new Set(rows.map(of).filter((value) => value !== null)).size > 1;
  const FIGURES = [
    { title: "Speed-up", from: "tables", only: (row) => row.rank !== null, cut: true, fits: (_, rows) => rows.length > 0,
      make: speedups, note: "Runs with a rank only." },
    { title: "Quality against speed", from: "tables", make: quality, fits: enough((row) => row.quality),
      note: "The line joins the runs that none beats in both; a cross is the baseline." },
    { title: "Speed-up by category of prompts", from: "tables", make: categories, cut: true,
      fits: (_, rows) => new Set(rows.flatMap((row) => Object.keys(row.categories))).size > 1,
      note: "n is the number of conversations; a few give an impression only." },
    { title: "Speed-up on novel text", from: "tables", make: novel, fits: enough((row) => row.novel),
      note: "Novel are conversations in which the baseline repeats at most a tenth of its tokens in stretches of 8 or " +
        "more, from the prompt or from itself. Below the line a method gains less there than on all text." },
    { title: "Tokens per step and speed-up", from: "tables", make: steps, fits: enough((row) => row.steps) },
    { title: "Speed-up over batch size", from: "batches", choose: "series", make: batches, fits: enough((row) => row.batch),
      note: (rows) => `Faster than the baseline, with the whole interval, up to batch size: ${lasting(rows)}. Crossed points are INCONCLUSIVE.` },
    { title: "Roofline", from: "roofs", choose: "machine", fits: () => true, make: (roof, _, width) => roofline(roof, width),
      note: "Each mark is a pass over as many nodes as its number says, the lines are the measured limits of the machine " +
        "(python -m bench cost).",
      entries(roof) {
        const { shades, marks } = looks(roof);
        return [...shades.domain().map((batch) => [`batch ${batch}`, shades(batch)]),
          ...marks.domain().map((context) => [`${GLYPHS[marks(context)]} context ${context}`, null])];
      } },
  ];
  const chosen = { tables: 0, batches: 0, roofs: 0 }; // the first of each is the most important one

  function origin(source) {
    const found = source.source ?? [...new Set(source.rows.map((row) => row.source))].sort().join(" and ");
    return found === "own and reference" ? "own and reference, own ones marked" : found;
  }

  function chooser(from, label) {
    const select = d3.create("select").on("change", (event) => { chosen[from] = Number(event.target.value); redraw(); });
    select.selectAll("option").data(data[from]).join("option").attr("value", (_, place) => place)
      .property("selected", (_, place) => place === chosen[from])
      .text((each) => `${origin(each)}: ${each.heading}`);
    const wrapped = d3.create("label").attr("class", "choose").text(`${label} `);
    wrapped.append(() => select.node());
    return wrapped.node();
  }

  function build() {
    const figures = d3.select(section).select(".figures");
    if (data.tables.length) figures.append(() => chooser("tables", "table"));
    for (const figure of FIGURES) {
      const made = figures.append("figure");
      made.append("h3").text(figure.title);
      if (figure.choose && data[figure.from].length > 1) made.append(() => chooser(figure.from, figure.choose));
      if (figure.entries) figure.legend = made.append("ul").attr("class", "legend");
      figure.plot = made.append("div").attr("class", "plot").node();
      figure.caption = made.append("figcaption").node();
      figure.node = made.node();
    }
  }

  // Each entry is a text and its colour, or null.
  function legend(list, entries) {
    list.selectAll("li").data(entries).join("li").text(([text]) => text).classed("swatch", ([, shade]) => shade !== null)
      .style("--mark", ([, shade]) => shade);
  }

  function redraw() {
    if (!section.clientWidth) return; // not laid out yet; the observer calls again
    const drawn = [];
    for (const figure of FIGURES) {
      const source = data[figure.from][chosen[figure.from]];
      const found = (source?.rows ?? []).filter((row) => keep(row.run) && (!figure.only || figure.only(row)));
      const rows = figure.cut ? found.slice(0, MOST) : found;
      const shown = source !== undefined && figure.fits(source, rows);
      figure.node.hidden = !shown;
      if (!shown) continue;
      drawn.push(...rows);
      const svg = figure.make(source, rows, Math.floor(figure.plot.clientWidth));
      figure.plot.replaceChildren(svg);
      figure.plot.classList.toggle("scrolls", svg.clientWidth > figure.plot.clientWidth);
      if (figure.entries) legend(figure.legend, figure.entries(source));
      const note = typeof figure.note === "function" ? figure.note(rows) : figure.note;
      const cut = rows.length < found.length ? `The first ${rows.length} of ${found.length} runs. ` : "";
      figure.caption.textContent = `${origin(source)}: ${source.heading}. ${cut}${note ?? ""}`;
      for (const link of svg.querySelectorAll("a")) link.setAttribute("tabindex", "-1"); // the table has them, too
      if (svg.querySelector(".ends")) spread(svg);
      else arrange(svg);
    }
    const families = [...new Set(drawn.map((row) => row.family))].sort();
    const entries = families.map((family) => [family, colour({ family })]);
    legend(d3.select(section).select(".legend"), [...entries, ["full mark: EXACT", null], ["hollow: the text may change", null]]);
    section.hidden = !drawn.length && !data.roofs.length;
  }

  let width = 0;
  build();
  section.hidden = false;
  new ResizeObserver(() => {
    if (Math.abs(section.clientWidth - width) < 1) return;
    width = section.clientWidth;
    redraw();
  }).observe(section);

  return {
    /** Draws the runs for which `passes(id of the row)` holds. */
    filter(passes) {
      keep = passes;
      section.hidden = false; // its width is needed
      if (section.clientWidth === width) redraw(); // else the observer does
    },
  };
})();
