
"use strict";
// Everything that is shown comes from the JSON in the page, and goes into it as text.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const main = document.getElementById("main");
const tip = document.getElementById("tip");
const hidden = new Set();
const redraw = [];

function el(name, props, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(props || {})) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return node;
}

function svg(name, props, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(props || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function colour(number) {
  return data.colours[number % data.colours.length];
}

function swatch(number) {
  const node = el("span", { class: "swatch", "aria-hidden": "true" });
  node.style.background = colour(number);
  return node;
}

function show(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && size < 0.001) return value.toExponential(2);
  return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

function section(id, title, note) {
  const node = el("section", { id, "aria-labelledby": id + "-h" }, el("h2", { id: id + "-h" }, title));
  if (note) node.append(el("p", { class: "soft" }, note));
  main.append(node);
  document.getElementById("nav").append(el("a", { href: "#" + id }, title));
  return node;
}

// ---- tables that sort ---------------------------------------------------------------------------

// A cell is a value, or {text, value, node}: what is shown, what it is sorted by.
function table(headings, rows, options = {}) {
  const cells = rows.map((row) => row.map((c) => (c !== null && typeof c === "object" ? c : { text: show(c), value: c })));
  const numeric = headings.map((_, i) => cells.some((r) => typeof r[i].value === "number") &&
    cells.every((r) => [null, undefined, ""].includes(r[i].value) || typeof r[i].value === "number"));
  const body = el("tbody");
  const lines = cells.map((row) => {
    const line = el("tr");
    row.forEach((cell, i) => {
      const text = cell.text === undefined ? show(cell.value) : cell.text;
      const kind = numeric[i] ? "num" : String(text).length > 56 ? "long" : "word";
      line.append(el("td", { class: kind + (cell.class ? " " + cell.class : "") }, ...(cell.node ? [cell.node] : []), text));
    });
    body.append(line);
    return { line, row };
  });
  const heads = headings.map((heading, i) => {
    const head = el("th", { scope: "col", class: numeric[i] ? "num" : "" });
    head.append(el("button", { type: "button", title: "Sort by " + heading, onclick: () => sort(i) }, heading));
    return head;
  });
  let last = -1, up = true;
  function sort(column) {
    up = column === last ? !up : true;
    last = column;
    heads.forEach((head, i) => {
      if (i === column) head.setAttribute("aria-sort", up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    const empty = (v) => v === null || v === undefined || v === "";
    lines.sort((a, b) => {
      const [x, y] = [a.row[column].value, b.row[column].value];
      if (empty(x) || empty(y)) return empty(x) - empty(y);
      const order = typeof x === "number" && typeof y === "number" ? x - y :
        String(x).localeCompare(String(y), "en", { numeric: true });
      return up ? order : -order;
    });
    body.append(...lines.map((one) => one.line));
  }
  const box = el("div", { class: "wide" + (options.short ? " short" : ""), tabindex: "0", role: "region", "aria-label": options.label || "table" },
    el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body));
  return { box, lines };
}

function filtered(made, label) {
  const count = el("span", { class: "soft", "aria-live": "polite" });
  const input = el("input", { type: "search", placeholder: label, "aria-label": label });
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const { line } of made.lines) {
      const text = line.textContent.toLowerCase();
      line.hidden = !words.every((word) => text.includes(word));
      left += !line.hidden;
    }
    count.textContent = words.length ? left + " of " + made.lines.length : "";
  });
  return el("div", { class: "tools" }, input, count);
}

function state(name) {
  return { text: name, value: name, class: "state " + name };
}

// ---- tooltip ------------------------------------------------------------------------------------

function say(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
  const top = y + 14 + box.height > innerHeight ? y - 14 - box.height : y + 14;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, top) + "px";
}

function hush() { tip.hidden = true; }
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hush(); });

// ---- curves -------------------------------------------------------------------------------------

function ticks(low, high, log, most) {
  const found = [];
  if (log) {
    const decades = Math.log10(high / low);
    const steps = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
      for (const s of steps) {
        const value = s * 10 ** e;
        if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
      }
    if (found.length >= 3) {
      const every = Math.ceil(found.length / most);
      return found.filter((_, i) => i % every === 0);
    }
    found.length = 0;
  }
  const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= raw);
  for (let v = Math.ceil(low / step) * step; v <= high + step / 1e6; v += step) found.push(Number(v.toPrecision(12)));
  return found;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return Number((value / 1e9).toPrecision(3)) + "B";
  if (size >= 1e6) return Number((value / 1e6).toPrecision(3)) + "M";
  if (size >= 1e4) return Number((value / 1e3).toPrecision(3)) + "k";
  return show(Number(value.toPrecision(4)));
}

function chart(spec, own) {
  const holder = el("div");
  const figure = el("figure", { class: "chart" }, el("figcaption", {}, spec.title), holder);
  const shown = () => spec.lines.filter((line) => line.group === null || !hidden.has(line.group));
  const alone = data.groups.length < 2;
  const ink = (line) => colour(line.group === null || alone ? spec.lines.indexOf(line) : line.group);
  const name = (line) => [line.run === null ? "" : data.runs[line.run].name, line.label].filter(Boolean).join(", ");
  function draw() {
    const width = Math.max(220, holder.clientWidth), height = Math.round(Math.min(320, Math.max(210, width * 0.6)));
    const box = { l: 52, r: 10, t: 8, b: 38 };
    const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: "0",
      "aria-label": `${spec.title}: ${spec.y} against ${spec.x}, ${spec.lines.length} lines. Arrow keys go from point to point.` });
    const lines = shown(), all = lines.flatMap((line) => line.points);
    holder.replaceChildren(node);
    if (!all.length) {
      node.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "all lines are hidden"));
      return;
    }
    const above = all.map((p) => p[0]).filter((x) => x > 0);
    const logX = spec.logX && above.length > 0, edge = logX ? above.reduce((a, b) => Math.min(a, b)) / 2 : 0;
    const at = (x) => (logX ? Math.max(x, edge) : x);
    const logY = spec.logY && all.every((p) => p[1] > 0);
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const [x, y] of all) {
      x0 = Math.min(x0, at(x)); x1 = Math.max(x1, at(x)); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
    }
    if (spec.reference !== null && (!logY || spec.reference > 0)) { y0 = Math.min(y0, spec.reference); y1 = Math.max(y1, spec.reference); }
    if (x1 === x0) x1 = logX ? x0 * 2 : x0 + 1;
    if (y1 === y0) { y0 = logY ? y0 / 1.1 : y0 - 0.5; y1 = logY ? y1 * 1.1 : y1 + 0.5; }
    else if (logY) { const pad = (y1 / y0) ** 0.04; y0 /= pad; y1 *= pad; }
    else { const pad = (y1 - y0) * 0.05; y0 -= pad; y1 += pad; }
    const share = (v, low, high, log) => (log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
    const px = (x) => box.l + share(at(x), x0, x1, logX) * (width - box.l - box.r);
    const py = (y) => height - box.b - share(y, y0, y1, logY) * (height - box.t - box.b);
    for (const y of ticks(y0, y1, logY, 6)) {
      node.append(svg("line", { class: "grid", x1: box.l, x2: width - box.r, y1: py(y), y2: py(y) }));
      node.append(svg("text", { x: box.l - 6, y: py(y) + 4, "text-anchor": "end" }, short(y)));
    }
    for (const x of ticks(x0, x1, logX, width < 420 ? 4 : 6)) {
      if (logX && (x <= edge * 1.01 || (px(x) - px(edge) < 22 && all.some((p) => p[0] === 0)))) continue;
      node.append(svg("line", { class: "grid", x1: px(x), x2: px(x), y1: box.t, y2: height - box.b }));
      node.append(svg("text", { x: px(x), y: height - box.b + 15, "text-anchor": "middle" }, short(x)));
    }
    if (logX && all.some((p) => p[0] === 0)) node.append(svg("text", { x: px(0), y: height - box.b + 15, "text-anchor": "middle" }, "0"));
    node.append(svg("text", { x: (box.l + width - box.r) / 2, y: height - 6, "text-anchor": "middle" }, spec.x));
    node.append(svg("text", { x: -(box.t + height - box.b) / 2, y: 11, transform: "rotate(-90)", "text-anchor": "middle" }, spec.y));
    if (spec.reference !== null) node.append(svg("line", { class: "ref", x1: box.l, x2: width - box.r, y1: py(spec.reference), y2: py(spec.reference) }));
    const paths = lines.map((line) => {
      const path = svg("path", { class: "line", stroke: ink(line), d: line.points.map((p, i) => (i ? "L" : "M") + px(p[0]).toFixed(1) + " " + py(p[1]).toFixed(1)).join("") });
      node.append(path);
      return path;
    });
    const dot = svg("circle", { r: 4, visibility: "hidden" });
    node.append(dot);
    let where = null;
    function mark(i, j) {
      where = [i, j];
      const line = lines[i], point = line.points[j], frame = node.getBoundingClientRect(), scale = frame.width / width;
      paths.forEach((path, k) => path.classList.toggle("near", k === i));
      node.classList.add("faint");
      dot.setAttribute("cx", px(point[0])); dot.setAttribute("cy", py(point[1]));
      dot.setAttribute("fill", ink(line)); dot.setAttribute("visibility", "visible");
      say(`${name(line)}\n${show(point[0])} ${spec.x}: ${show(point[1])} ${spec.y}`, frame.left + px(point[0]) * scale, frame.top + py(point[1]) * scale);
    }
    function leave() {
      where = null;
      node.classList.remove("faint");
      dot.setAttribute("visibility", "hidden");
      hush();
    }
    function nearest(event) {
      const frame = node.getBoundingClientRect(), scale = width / frame.width;
      const [x, y] = [(event.clientX - frame.left) * scale, (event.clientY - frame.top) * scale];
      let best = Infinity, hit = null;
      lines.forEach((line, i) => line.points.forEach((p, j) => {
        const far = (px(p[0]) - x) ** 2 + (py(p[1]) - y) ** 2;
        if (far < best) { best = far; hit = [i, j]; }
      }));
      if (best < 60 ** 2) mark(...hit); else leave();
    }
    node.addEventListener("pointermove", nearest);
    node.addEventListener("pointerdown", nearest);
    node.addEventListener("pointerleave", leave);
    node.addEventListener("blur", leave);
    node.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!step) return;
      event.preventDefault();
      const [i, j] = where || [0, -step[1]];
      const k = (i + step[0] + lines.length) % lines.length, n = lines[k].points.length;
      mark(k, Math.min(n - 1, Math.max(0, j + step[1])));
    });
  }
  (own || redraw).push(draw);
  let before = 0;
  new ResizeObserver(() => {
    if (holder.clientWidth !== before) { before = holder.clientWidth; draw(); }
  }).observe(holder);
  return figure;
}

function legend() {
  const buttons = data.groups.map((group, i) => {
    const button = el("button", { type: "button", "aria-pressed": "true", onclick: () => toggle(i) }, swatch(i), group.label || "runs");
    return button;
  });
  function set(i, on) {
    if (on) hidden.delete(i); else hidden.add(i);
    buttons[i].setAttribute("aria-pressed", String(on));
  }
  function toggle(i) { set(i, hidden.has(i)); redraw.forEach((draw) => draw()); }
  function every(on) { buttons.forEach((_, i) => set(i, on)); redraw.forEach((draw) => draw()); }
  return el("div", {},
    el("div", { class: "tools" },
      el("button", { type: "button", class: "plain", onclick: () => every(true) }, "show all"),
      el("button", { type: "button", class: "plain", onclick: () => every(false) }, "hide all")),
    el("div", { class: "legend", role: "group", "aria-label": "Groups of runs" }, ...buttons));
}

// ---- heat maps ----------------------------------------------------------------------------------

const STOPS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

function shade(share) {
  const place = Math.min(0.9999, Math.max(0, share)) * (STOPS.length - 1), i = Math.floor(place), part = place - i;
  return STOPS[i].map((c, k) => Math.round(c + (STOPS[i + 1][k] - c) * part));
}

function heat(node) {
  const { rows, quantities } = data.heat;
  const pick = el("select", { "aria-label": "Quantity" }, ...quantities.map((q, i) => el("option", { value: i }, q.title)));
  const runs = [...new Set(rows.map((row) => row.run))];
  const when = el("select", { "aria-label": "Rows" });
  if (runs.length > 1) when.append(el("option", { value: "last" }, "all runs, at their end"), el("option", { value: "first" }, "all runs, at their beginning"));
  when.append(...runs.map((run) => el("option", { value: run }, data.runs[run].name + ", from its beginning to its end")));
  const what = el("p", { class: "soft" }), scale = el("div", { class: "scale" }), holder = el("div", { class: "heat", tabindex: "0", role: "region", "aria-label": "Heat map" });
  function draw() {
    const q = quantities[Number(pick.value)];
    let own = rows.filter((row) => row.values[q.key]);
    const overall = when.value === "last" || when.value === "first";
    if (overall) own = runs.map((run) => own.filter((row) => row.run === run).at(when.value === "last" ? -1 : 0)).filter(Boolean);
    else own = own.filter((row) => row.run === Number(when.value));
    const values = own.flatMap((row) => row.values[q.key]).filter((v) => v !== null);
    what.textContent = q.title + ": " + q.what + ". Grey layers keep attention, or have no value.";
    if (!values.length) { holder.replaceChildren("no values"); scale.replaceChildren(); return; }
    let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    const log = q.log && low > 0;
    const share = (v) => (high === low ? 0.5 : log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
    const bar = el("span", { class: "bar", "aria-hidden": "true" });
    bar.style.background = `linear-gradient(90deg, ${STOPS.map((s) => `rgb(${s})`).join(",")})`;
    scale.replaceChildren(show(low), bar, show(high) + (log ? " (logarithmic)" : ""));
    const layers = own.reduce((most, row) => Math.max(most, row.values[q.key].length), 0);
    const names = own.map((row) => (overall ? data.groups[data.runs[row.run].group].label + ", seed " + data.runs[row.run].seed : row.moment));
    const narrow = holder.clientWidth < 480, longest = names.reduce((most, n) => Math.max(most, n.length), 0);
    const left = Math.min(narrow ? 110 : 260, 12 + 6.2 * longest), high1 = own.length > 60 ? 12 : 20;
    const cell = Math.max(narrow ? 14 : 16, Math.min(60, (holder.clientWidth - left - 24) / layers));
    const width = left + cell * layers + 4, height = high1 * own.length + 22;
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${q.title} by layer, ${own.length} rows` });
    picture.style.width = width + "px";
    const most = Math.floor((left - 12) / 6.2);
    own.forEach((row, j) => {
      const text = svg("text", { x: left - 8, y: 18 + high1 * j + high1 / 2 + 4, "text-anchor": "end" }, names[j].length > most ? names[j].slice(0, most - 1) + "\u2026" : names[j]);
      picture.append(text);
      for (let i = 0; i < layers; i++) {
        const v = row.values[q.key][i], known = v !== null && v !== undefined;
        const tone = known ? shade(share(v)) : null;
        const rect = svg("rect", { x: left + cell * i, y: 18 + high1 * j, width: cell - 1, height: high1 - 1, fill: known ? `rgb(${tone})` : "var(--none)" });
        rect.dataset.tip = `${data.runs[row.run].name}\n${row.moment}, layer ${i}: ${known ? q.title + " " + show(v) : "no value"}`;
        picture.append(rect);
        if (known && cell >= 40 && high1 >= 18) {
          const light = tone[0] * 0.299 + tone[1] * 0.587 + tone[2] * 0.114 > 140;
          const label = svg("text", { x: left + cell * (i + 0.5) - 0.5, y: 18 + high1 * j + 14, "text-anchor": "middle", "pointer-events": "none" }, Number(v.toPrecision(2)));
          label.style.fill = light ? "#111" : "#fff";
          picture.append(label);
        }
      }
    });
    const every = Math.ceil(layers * 20 / (cell * layers) );
    for (let i = 0; i < layers; i += every) picture.append(svg("text", { x: left + cell * (i + 0.5), y: 12, "text-anchor": "middle" }, i));
    holder.replaceChildren(picture);
  }
  holder.addEventListener("pointermove", (event) => {
    const text = event.target.dataset && event.target.dataset.tip;
    if (text) say(text, event.clientX, event.clientY); else hush();
  });
  holder.addEventListener("pointerleave", hush);
  pick.addEventListener("change", draw);
  when.addEventListener("change", draw);
  node.append(el("div", { class: "tools" }, el("label", {}, "Quantity ", pick), el("label", {}, "Rows ", when)), what, scale, holder);
  let before = 0;
  new ResizeObserver(() => {
    if (holder.clientWidth !== before) { before = holder.clientWidth; draw(); }
  }).observe(node);
}

// ---- the page -----------------------------------------------------------------------------------

function tiles() {
  const items = [[data.runs.length, data.runs.length === 1 ? "run" : "runs"], [data.groups.length, data.groups.length === 1 ? "configuration" : "configurations"]];
  for (const [name, count] of Object.entries(data.states)) items.push([count, name, name]);
  const over = data.measures.findIndex((m) => m.name === "student/perplexity_over_teacher");
  if (over >= 0) {
    const best = data.groups.filter((g) => g.cells[over]).sort((a, b) => a.cells[over].value - b.cells[over].value)[0];
    if (best) items.push([show(best.cells[over].value) + " x", "teacher's perplexity, " + (data.groups.length > 1 ? "best: " + best.label : "the student's")]);
  }
  return el("div", { class: "tiles" }, ...items.map(([number, label, kind]) => el("div", { class: "tile" }, el("b", { class: kind || "" }, show(number)), el("span", {}, label))));
}

function damaged(node) {
  node.append(el("div", { class: "warn", role: "alert" },
    el("strong", {}, data.damaged.length === 1 ? "1 folder cannot be read and is left out:" : `${data.damaged.length} folders cannot be read and are left out:`),
    el("ul", {}, ...data.damaged.map((one) => el("li", {}, `${one.path}: ${one.reason}`)))));
}

function summary() {
  const node = section("summary", "Summary");
  node.append(tiles());
  if (data.damaged.length) damaged(node);
  if (!data.groups.length) return;
  const spread = data.spread === "std" ? "standard deviation" : "standard error of the mean";
  node.append(el("p", { class: "soft" }, `Mean and ${spread} over the seeds of n finished runs. Perplexity is on held-out text; errors are relative, squared, and of a layer or block on selection tokens. A click on a heading sorts.`));
  const heads = data.headings;
  const rows = data.groups.map((group, i) => [
    ...group.heads.map((text, k) => {
      const value = text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
      return k ? { text, value } : { text: text || "(none)", value, node: swatch(i) };
    }),
    ...group.cells.map((cell) => cell || { text: "", value: null }),
  ]);
  node.append(table(heads, rows, { label: "Configurations" }).box);
}

function copying(text) {
  const pre = el("pre", { tabindex: "0" }, text);
  const button = el("button", { type: "button", class: "plain", onclick: () => {
    getSelection().selectAllChildren(pre);
    document.execCommand("copy");
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  } }, "copy");
  return [pre, el("div", { class: "tools" }, button)];
}

function sweeps() {
  if (!data.sweeps.length) return;
  const node = section("sweeps", "Sweeps");
  for (const sweep of data.sweeps) {
    const counts = Object.entries(sweep.states).map(([name, count]) => `${count} ${name}`).join(", ");
    node.append(el("h3", {}, sweep.path), el("p", { class: "soft" }, [`${sweep.jobs.length} jobs: ${counts}`, sweep.launcher && "launcher " + sweep.launcher, sweep.created].filter(Boolean).join("; ")));
    if (sweep.commands.length) node.append(el("p", {}, "What is neither done nor running is run by:"), ...copying(sweep.commands.join("\n")));
    const rows = sweep.jobs.map((job) => [job[0], job[1], state(job[2]), job[3], job[4], job[5]]);
    node.append(table(["job", "run", "state", "stage", "why", "overrides"], rows, { short: true, label: "Jobs of " + sweep.path }).box);
  }
  node.append(el("p", { class: "soft" }, "Whether a run is at work is known from a lock that this machine could see, or else from when it last wrote something; a run on another machine that is silent for ten minutes counts as stopped."));
}

function runs() {
  if (!data.runs.length) return;
  const node = section("runs", "Runs");
  const rows = data.runs.map((run) => [
    { text: run.name, value: run.name, node: swatch(run.group) }, state(run.state), run.stage, ...data.keys.map((key) => run.config[key]), run.seed, ...run.values,
    run.state === "done" ? "" : run.why, { text: run.path, value: run.path, class: "path" },
  ]);
  const heads = ["run", "state", "last stage", ...data.keys.map((key) => key.replace(/\.name$/, "")), "seed", ...data.measures.map((m) => m.short), "why", "folder"];
  const made = table(heads, rows, { label: "Runs" });
  if (rows.length > 8) node.append(filtered(made, "filter runs"));
  node.append(made.box);
}

function curves() {
  if (!data.charts.length) return;
  const node = section("curves", "Curves", "Point at a line for its run and values; the arrow keys go along it. Long curves are thinned to evenly picked points.");
  const grouped = data.charts.filter((spec) => spec.kind !== "recorded"), rest = data.charts.filter((spec) => spec.kind === "recorded");
  if (grouped.length) {
    if (data.groups.length > 1) node.append(legend());
    node.append(el("div", { class: "charts" }, ...grouped.map((spec) => chart(spec))));
  }
  if (rest.length) node.append(el("h3", {}, "From recorded results"), el("div", { class: "charts" }, ...rest.map((spec) => chart(spec, []))));
}

function differences() {
  if (!data.runs.length) return;
  const node = section("configuration", "Configuration");
  if (data.runs.length > 1) {
    const rows = data.differing.map((key) => {
      const counts = new Map();
      for (const run of data.runs) { const v = show(run.config[key]) || "null"; counts.set(v, (counts.get(v) || 0) + 1); }
      return [key, [...counts].map(([v, n]) => `${v} (${n})`).join(", ")];
    });
    node.append(el("h3", {}, "Keys that differ"));
    if (rows.length) node.append(table(["key", "values (runs)"], rows, { short: true, label: "Keys that differ" }).box);
    else node.append(el("p", {}, "None: the runs have one configuration."));
    const choose = (label, at) => {
      const pick = el("select", { "aria-label": label }, ...data.runs.map((run, i) => el("option", { value: i }, run.name)));
      pick.value = String(at);
      pick.addEventListener("change", compare);
      return pick;
    };
    const [a, b] = [choose("First run", 0), choose("Second run", data.runs.length - 1)], result = el("div", { id: "compared" });
    function compare() {
      const [x, y] = [a, b].map((pick) => data.runs[Number(pick.value)]);
      const own = data.differing.filter((key) => x.config[key] !== y.config[key]).map((key) => [key, { text: show(x.config[key]) || "null", value: x.config[key] }, { text: show(y.config[key]) || "null", value: y.config[key] }]);
      result.replaceChildren(own.length ? table(["key", "first", "second"], own, { short: true, label: "Differences" }).box : "They have the same configuration.");
    }
    node.append(el("h3", {}, "Two runs"), el("div", { class: "tools" }, el("label", {}, "First ", a), el("label", {}, "Second ", b)), result);
    compare();
  }
  const common = Object.entries(data.common);
  node.append(el("details", {}, el("summary", {}, `${common.length} keys that all runs share`), table(["key", "value"], common.map(([key, value]) => [key, { text: show(value) || "null", value }]), { short: true, label: "Shared configuration" }).box));
}

function provenance() {
  const own = data.provenance;
  if (!own.rows.length) return;
  const node = section("provenance", "Provenance", "Commit and code of each run, the keys of what it was made from, and the hash of its student's weights. Equal keys are equal contents.");
  node.append(table(own.headings, own.rows, { label: "Provenance" }).box);
  own.machines.filter((machine) => Object.keys(machine.facts).length).forEach((machine) => {
    const facts = Object.entries(machine.facts).map(([key, value]) => [key, { text: key === "memory_bytes" && typeof value === "number" ? (value / 1e9).toFixed(1) + " GB" : typeof value === "number" ? String(value) : show(value) || "none", value: String(value) }]);
    node.append(el("details", {}, el("summary", {}, `Environment ${machine.number + 1}: ${machine.runs} ${machine.runs === 1 ? "run" : "runs"}, ${[machine.facts.cpu, machine.facts.torch && "torch " + machine.facts.torch].filter(Boolean).join(", ")}`), table(["", "value"], facts, { short: true, label: "Environment" }).box));
  });
}

function recorded() {
  if (!data.recorded.length) return;
  const node = section("recorded", "Recorded results", "Tables that were committed with their experiments.");
  for (const one of data.recorded) node.append(el("h3", {}, one.title), el("p", { class: "soft" }, one.note), table(one.headings, one.rows, { short: true, label: one.title }).box);
}

document.getElementById("head").append(el("h1", {}, data.title), el("p", { class: "soft" }, `Taylor-Calibrate ${data.version}, ${data.made}`));
summary();
sweeps();
curves();
if (data.heat.rows.length) heat(section("layers", "Layers"));
runs();
recorded();
differences();
provenance();
document.getElementById("foot").append(el("p", {}, "Made by python -m tc.report. This page holds all of its data and loads nothing."));
document.body.dataset.ready = "yes";
