"use strict";
(() => {
const byId = (id) => document.getElementById(id);
const all = (query, within = document) => [...within.querySelectorAll(query)];
const DATA = JSON.parse(byId("data").textContent);
const root = document.documentElement;

// -- theme: system, light, dark -------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];
let theme = 0;
byId("theme").addEventListener("click", () => {
  theme = (theme + 1) % THEMES.length;
  if (theme === 0) delete root.dataset.theme;
  else root.dataset.theme = THEMES[theme];
  byId("theme").textContent = "Theme: " + THEMES[theme];
});

// -- tabs ------------------------------------------------------------------------------------------------------------

const tabs = all('[role="tab"]');
const panels = tabs.map((tab) => byId(tab.getAttribute("aria-controls")));
const WITH_LEGEND = ["curves", "health", "choices"];
let current = -1;

function show(at, focus) {
  current = at;
  tabs.forEach((tab, i) => {
    tab.setAttribute("aria-selected", String(i === at));
    tab.tabIndex = i === at ? 0 : -1;
    panels[i].hidden = i !== at;
  });
  const legend = byId("legend");
  if (legend) legend.hidden = !WITH_LEGEND.includes(panels[at].id);
  if (focus) tabs[at].focus();
  hideTip();
}

function go(id, scroll) {
  const target = byId(id);
  const at = target ? panels.findIndex((panel) => panel.contains(target)) : -1;
  if (at < 0) return false;
  show(at, false);
  if (scroll && target !== panels[at]) target.scrollIntoView();
  return true;
}

tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => {
    show(i, false);
    history.replaceState(null, "", "#" + panels[i].id);
  });
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const at = (to + tabs.length) % tabs.length;
    show(at, true);
    history.replaceState(null, "", "#" + panels[at].id);
  });
});
addEventListener("hashchange", () => go(location.hash.slice(1), true));

// -- tips: by pointer, and by arrow keys within a figure --------------------------------------------------------------

const tip = byId("tip");

function showTip(text, box) {
  tip.textContent = text;
  tip.hidden = false;
  const own = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left + box.width / 2 - own.width / 2), innerWidth - own.width - 8);
  const above = box.top - own.height - 8;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = (above > 4 ? above : box.bottom + 8) + "px";
}

function hideTip() {
  tip.hidden = true;
  all(".now").forEach((element) => element.classList.remove("now"));
}

function choose(element, spoken) {
  hideTip();
  element.classList.add("now");
  showTip(element.dataset.tip, element.getBoundingClientRect());
  if (spoken) byId("say").textContent = element.dataset.tip;
}

document.addEventListener("pointerover", (event) => {
  const element = event.target.closest("[data-tip]");
  if (element) choose(element, false);
  else if (!tip.hidden && !event.target.closest("#explorer")) hideTip();
});
addEventListener("scroll", () => { if (!tip.hidden && document.activeElement === document.body) hideTip(); });

function stepThrough(event) {
  const points = all("[data-tip]", event.currentTarget).filter((point) => !point.closest(".off"));
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const ends = { Home: 0, End: points.length - 1 }[event.key];
  if (event.key === "Escape") return hideTip();
  if (!points.length || (by === undefined && ends === undefined)) return;
  event.preventDefault();
  const at = points.findIndex((point) => point.classList.contains("now"));
  const next = ends ?? (at < 0 ? (by > 0 ? 0 : points.length - 1) : (at + by + points.length) % points.length);
  points[next].scrollIntoView({ block: "nearest", inline: "nearest" });
  choose(points[next], true);
}

for (const figure of all("[data-points]")) {
  figure.addEventListener("keydown", stepThrough);
  figure.addEventListener("focus", () => {
    if (figure.matches(":focus-visible") && figure.classList.contains("strip"))
      showTip(figure.getAttribute("aria-label").replace(/\. /, "\n").replace(/; /g, "\n"), figure.getBoundingClientRect());
  });
  figure.addEventListener("blur", hideTip);
}

// -- on paper everything is open -------------------------------------------------------------------------------------

let folded = [];
addEventListener("beforeprint", () => {
  folded = all("details:not([open])");
  folded.forEach((element) => { element.open = true; });
});
addEventListener("afterprint", () => folded.forEach((element) => { element.open = false; }));

// -- which settings the figures show ---------------------------------------------------------------------------------

const keys = all(".keys button");
const on = DATA.settings.map((_, i) => keys.some((key) => Number(key.dataset.s) === i && key.getAttribute("aria-pressed") === "true"));

function shownOnly() {
  keys.forEach((key) => key.setAttribute("aria-pressed", String(on[key.dataset.s])));
  all("g[data-s]").forEach((group) => group.classList.toggle("off", !on[group.dataset.s]));
  draw();
}
keys.forEach((key) => key.addEventListener("click", () => {
  on[key.dataset.s] = !on[key.dataset.s];
  shownOnly();
}));
all("[data-all]").forEach((button) => button.addEventListener("click", () => {
  on.fill(button.dataset.all === "true");
  shownOnly();
}));

// -- boxes wider than the screen say so ---------------------------------------------------------------------------

function hints() {
  for (const [box, hint] of boxes) hint.hidden = box.scrollWidth <= box.clientWidth + 1;
}
const boxes = all(".scroll").map((box) => {
  const hint = document.createElement("p");
  hint.className = "hint";
  hint.textContent = "Wider than the screen: scroll sideways for more →";
  hint.hidden = true;
  box.before(hint);
  return [box, hint];
});
const watch = new ResizeObserver(hints);
boxes.forEach(([box]) => { watch.observe(box); [...box.children].forEach((child) => watch.observe(child)); });

// -- the large figure ------------------------------------------------------------------------------------------------

const place = byId("explorer");
const SVG = "http://www.w3.org/2000/svg";
let plotted = null; // what the cursor reads: scales and the curves drawn
let cursor = -1;

function make(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function ticks(low, high, most) {
  let found = [];
  for (const finer of [1, 2, 4]) {
    const raw = (high - low) / (most * finer);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * (1 - 1e-9));
    found = [];
    for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) found.push(i * step);
    if (found.length > 1) break;
  }
  return found;
}

function powers(low, high) {
  const found = [];
  const [bottom, top] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const stride = Math.ceil((top - bottom) / 8) || 1;
  const every = top - bottom <= 3 && Math.log10(high) - Math.log10(low) <= 2 ? [1, 2, 5] : [1];
  for (let d = Math.floor(bottom / stride) * stride; d <= top; d += stride)
    for (const m of every) if (m * 10 ** d >= low && m * 10 ** d <= high) found.push(m * 10 ** d);
  return found;
}

const UNITS = [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]];
const BEYOND = 1e15; // from here on powers of ten, as in text.py
const minus = (text) => text.replaceAll("-", "−").replace("e+", "e");

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= BEYOND)) return minus(value.toExponential(2));
  const [, unit, letter] = UNITS.find(([from]) => size >= from) || [0, 1, ""];
  return minus(Number((value / unit).toPrecision(4)) + letter);
}

// Marks of an axis: as many decimals as tell them apart, none twice.
function aligned(marks) {
  const top = Math.max(...marks.map(Math.abs), 0);
  const powers = top && (top < 1e-4 || top >= BEYOND);
  const [, unit, letter] = (!powers && UNITS.find(([from]) => top >= from)) || [0, 1, ""];
  const step = Math.min(...marks.slice(1).map((mark, i) => mark - marks[i]), Infinity);
  let made = [];
  for (let decimals = 0; decimals < 17; decimals++) {
    const bare = marks.map((mark) => (powers ? (mark ? mark.toExponential(decimals) : "0") : (mark / unit).toFixed(decimals)));
    made = bare.map((text, i) => minus(text) + (marks[i] ? letter : ""));
    const off = Math.max(...bare.map((text, i) => Math.abs(Number(text) * unit - marks[i])), 0);
    if (new Set(made).size === made.length && off <= (step < Infinity ? 0.01 * step : 0.005 * top)) break;
  }
  return made;
}

const plain = (mark) => (mark >= 1e-4 && mark < 1e5 ? String(Number(mark.toPrecision(6))) : minus(mark.toExponential(0)));

// As in svg.py: never so short that it shows rounding alone.
function span(least, most) {
  const [low, high] = [least, most].map((v) => Math.min(Math.max(v, -1e290), 1e290));
  const size = Math.max(Math.abs(low), Math.abs(high));
  const spread = high - low;
  const room = spread <= Math.max(1e-5 * size, 1e-290) ? (size > 1e-290 ? size / 10 : 0.5)
    : Math.max(spread * 0.05, (1e-3 * size - spread) / 2);
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

function scale(low, high, start, end, log) {
  const f = log ? Math.log : (v) => v;
  const k = (end - start) / (f(high) - f(low));
  return Object.assign((value) => start + (f(value) - f(low)) * k, { low, high, start, end });
}

function lineOf(xs, ys, x, y, log) {
  let d = "";
  let pen = "M";
  for (let i = 0; i < xs.length; i++) {
    const bad = ys[i] === null || (log && ys[i] <= 0);
    if (!bad) d += pen + x(xs[i]).toFixed(1) + " " + y(ys[i]).toFixed(1);
    pen = bad ? "M" : "L";
  }
  return d;
}

// Values without a neighbour: a line has no length there, so they need a dot.
const lonely = (ys) => ys.flatMap((v, i) => (v !== null && (ys[i - 1] ?? null) === null && (ys[i + 1] ?? null) === null ? [i] : []));

function bandOf([, xs, , low, high], x, y, log) {
  let d = "";
  let from = -1;
  const fine = (i) => low[i] !== null && high[i] !== null && !(log && high[i] <= 0);
  const at = (i, v) => x(xs[i]).toFixed(1) + " " + y(log ? Math.max(v, y.low) : v).toFixed(1);
  for (let i = 0; i <= xs.length; i++) {
    if (i < xs.length && fine(i)) { if (from < 0) from = i; continue; }
    if (from >= 0) {
      const there = [];
      const back = [];
      for (let j = from; j < i; j++) { there.push(at(j, high[j])); back.unshift(at(j, low[j])); }
      d += "M" + there.join("L") + "L" + back.join("L") + "Z";
    }
    from = -1;
  }
  return d;
}

function along(run, axis, steps) {
  if (axis === "step") return steps;
  const map = run.axes[axis];
  if (!map) return null;
  let j = 0;
  return steps.map((step) => {
    while (j < map[0].length - 2 && map[0][j + 1] < step) j++;
    const width = map[0][j + 1] - map[0][j];
    return width ? map[1][j] + ((step - map[0][j]) / width) * (map[1][j + 1] - map[1][j]) : map[1][j];
  });
}

function draw() {
  if (!place || !DATA.metrics.length) return;
  const [metric, axis] = [byId("metric").value, byId("axis").value];
  const [bands, single, log] = ["bands", "single", "log"].map((id) => byId(id).checked);
  const curves = ((DATA.curves[metric] || {})[axis] || []).filter((curve) => on[curve[0]]);
  const runs = single ? DATA.runs.filter((run) => on[run.s] && run.m[metric])
    .map((run) => [run.s, along(run, axis, run.m[metric][0]), run.m[metric][1]]).filter((run) => run[1]) : [];
  const name = DATA.metrics.find(([key]) => key === metric)[1];
  const narrow = innerWidth < 640;
  const [width, height] = narrow ? [420, 330] : [1000, 440];
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", tabindex: 0,
    "aria-label": `${name} against ${DATA.axes.find(([key]) => key === axis)[1]}, ${curves.length} settings. Arrow keys read off values.` });
  // The frame holds all means and runs; a band only but for its outermost 5%, as two seeds make it arbitrarily wide.
  const usual = bands ? middle(curves.flatMap((c) => [...c[3], ...c[4]])) : [];
  const values = [...curves.flatMap((c) => c[2]), ...usual, ...runs.flatMap((r) => r[2])];
  const finite = values.filter((v) => v !== null && (!log || v > 0));
  const xs = [...curves.flatMap((c) => [c[1][0], c[1].at(-1)]), ...runs.flatMap((r) => [r[1][0], r[1].at(-1)])];
  place.replaceChildren();
  const title = document.createElement("p");
  title.className = "yname";
  title.textContent = name + (log ? ", log scale" : "");
  place.append(title);
  plotted = null;
  if (!finite.length) {
    const note = document.createElement("p");
    note.textContent = curves.length ? "No positive values for a log scale." : "Nothing to show: no setting chosen has this metric on this axis.";
    place.append(note);
    return;
  }
  const least = (list) => list.reduce((a, b) => Math.min(a, b));
  const most = (list) => list.reduce((a, b) => Math.max(a, b));
  let [low, high] = [least(finite), most(finite)];
  if (log) [low, high] = [low / 1.15, high * 1.15];
  else [low, high] = span(low, high);
  const [from, to] = [least(xs), most(xs)];
  const tens = log ? powers(low, high) : [];
  const marks = tens.length > 1 ? tens : ticks(low, high, 6);
  const told = tens.length > 1 ? tens.map(plain) : aligned(marks);
  const left = Math.max(narrow ? 52 : 64, 12 + 7.2 * Math.max(...told.map((text) => text.length)));
  const x = scale(from, to > from ? to : from + 1, left, width - 14, false);
  const y = scale(low, high, height - 46, 12, log);
  for (const [i, value] of marks.entries()) {
    svg.append(make("line", { x1: left, x2: width - 14, y1: y(value), y2: y(value), class: "grid" }));
    svg.append(make("text", { x: left - 8, y: y(value) + 4, class: "tick end" }, told[i]));
  }
  const across = ticks(x.low, x.high, narrow ? 4 : 8);
  const words = aligned(across);
  for (const [i, value] of across.entries()) {
    svg.append(make("line", { x1: x(value), x2: x(value), y1: y.start, y2: y.start + 5, class: "axis" }));
    svg.append(make("text", { x: x(value), y: y.start + 19, class: "tick mid" }, words[i]));
  }
  svg.append(make("line", { x1: left, x2: width - 14, y1: y.start, y2: y.start, class: "axis" }));
  svg.append(make("text", { x: width - 14, y: height - 8, class: "tick end" }, DATA.axes.find(([key]) => key === axis)[1]));
  const clip = make("clipPath", { id: "frame" });
  clip.append(make("rect", { x: left, y: 8, width: width - 14 - left, height: y.start - 8 }));
  const inside = make("g", { "clip-path": "url(#frame)" });
  svg.append(clip, inside);
  if (bands) for (const curve of curves) inside.append(make("path", { d: bandOf(curve, x, y, log), class: `band c${curve[0]}` }));
  for (const [s, at, ys] of runs) inside.append(make("path", { d: lineOf(at, ys, x, y, log), class: `line single c${s}` }));
  for (const curve of curves) inside.append(make("path", { d: lineOf(curve[1], curve[2], x, y, log), class: `line c${curve[0]}` }));
  for (const [c, at, mean, low, high] of curves) for (const i of lonely(mean)) {
    if (log && mean[i] <= 0) continue;
    const [px, py] = [x(at[i]), y(mean[i])];
    if (bands && low[i] !== null && high[i] !== null)
      inside.append(make("line", { x1: px, x2: px, y1: y(log ? Math.max(low[i], y.low) : low[i]), y2: y(high[i]), class: `line thin lone c${c}` }));
    inside.append(make("circle", { cx: px, cy: py, r: 3.6, class: `dot lone c${c}` }));
  }
  for (const [s, at, ys] of runs) for (const i of lonely(ys))
    if (!log || ys[i] > 0) inside.append(make("circle", { cx: x(at[i]), cy: y(ys[i]), r: 2.2, class: `dot lone c${s}` }));
  const mark = make("line", { y1: 12, y2: y.start, x1: 0, x2: 0, class: "cursor", visibility: "hidden" });
  svg.append(mark);
  place.append(svg);
  cursor = -1;
  plotted = { svg, x, y, curves, mark, width, grid: [...new Set(curves.flatMap((c) => c[1]))].sort((a, b) => a - b) };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = x.low + (((event.clientX - box.left) / box.width) * width - x.start) / (x.end - x.start) * (x.high - x.low);
    readOff(nearest(plotted.grid, at), false);
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const last = plotted.grid.length - 1;
    const stride = event.shiftKey ? 10 : 1;
    const next = { ArrowRight: Math.min(cursor + stride, last), ArrowLeft: Math.max(cursor - stride, 0), Home: 0, End: last }[event.key];
    if (event.key === "Escape") leave();
    if (next === undefined) return;
    event.preventDefault();
    readOff(next, true);
  });
}

function middle(values) {
  const sorted = values.filter((v) => v !== null).sort((a, b) => a - b);
  return sorted.length ? [sorted[Math.floor(sorted.length * 0.05)], sorted[Math.ceil(sorted.length * 0.95) - 1]] : [];
}

function nearest(sorted, value) {
  let best = 0;
  sorted.forEach((v, i) => { if (Math.abs(v - value) < Math.abs(sorted[best] - value)) best = i; });
  return best;
}

function leave() {
  hideTip();
  if (plotted) plotted.mark.setAttribute("visibility", "hidden");
}

function readOff(at, spoken) {
  const { svg, x, curves, mark, grid, width } = plotted;
  cursor = at;
  const value = grid[at];
  const found = curves.map((curve) => {
    const i = nearest(curve[1], value);
    const n = Array.isArray(curve[5]) ? curve[5][i] : curve[5];
    const within = curve[3][i] === null ? "" : ` (${number(curve[3][i])} to ${number(curve[4][i])})`;
    const inside = value >= curve[1][0] && value <= curve[1].at(-1);
    return inside && curve[2][i] !== null ? [curve[2][i], `${number(curve[2][i])}${within}, n = ${n}: ${DATA.settings[curve[0]]}`] : null;
  }).filter(Boolean).sort((a, b) => b[0] - a[0]);
  const text = `at ${number(value)}\n` + found.slice(0, 10).map(([, line]) => line).join("\n")
    + (found.length > 10 ? `\nand ${found.length - 10} more` : "");
  mark.setAttribute("x1", x(value));
  mark.setAttribute("x2", x(value));
  mark.setAttribute("visibility", "visible");
  const box = svg.getBoundingClientRect();
  showTip(text, { left: box.left + (x(value) / width) * box.width, width: 0, top: box.top + 90, bottom: box.top });
  if (spoken) byId("say").textContent = text;
}

function fill(select, entries) {
  for (const [value, text] of entries) select.append(new Option(text, value));
}

if (place) {
  fill(byId("metric"), DATA.metrics);
  fill(byId("axis"), DATA.axes);
  ["metric", "axis", "bands", "single", "log"].forEach((id) => byId(id).addEventListener("change", draw));
  let narrow = innerWidth < 640;
  addEventListener("resize", () => { if (narrow !== (innerWidth < 640)) { narrow = !narrow; draw(); } });
}
all("[data-open]").forEach((button) => button.addEventListener("click", () => {
  byId("metric").value = button.dataset.open;
  draw();
  go("explore", true);
  byId("metric").focus();
}));
draw();
if (!go(location.hash.slice(1), true)) show(0, false);
root.dataset.ready = "yes";
})();
