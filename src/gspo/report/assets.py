"""Style sheet and script of the report page."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --ink: #1c1d20; --soft: #5d6069; --line: #e2e2de; --grid: #ececea;
  --good: #1f8a5b; --bad: #c0453a; --chip: #efefec;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131417; --card: #1b1d21; --ink: #e8e8e6; --soft: #a0a3ac; --line: #2d3037; --grid: #2a2d33;
    --good: #57c193; --bad: #ee8278; --chip: #272a30;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "Liberation Sans", Arial, sans-serif;
}
main { max-width: 1280px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 13px; margin: 36px 0 12px; color: var(--soft); text-transform: uppercase; letter-spacing: 0.08em; }
h3 { font-size: 16px; line-height: 1.3; margin: 0 0 2px; }
p { margin: 0; }
.soft { color: var(--soft); }
.lead { color: var(--soft); font-size: 15px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 16px; }
@media (max-width: 520px) { .grid { grid-template-columns: 1fr; } }
.chart:last-child:nth-child(odd) { grid-column: 1 / -1; }
.chart p { color: var(--soft); font-size: 13px; }
.chart { display: flex; flex-direction: column; }
.plot { height: 285px; margin: auto -6px -6px; }
.key { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 6px 0 4px; }
.key button {
  display: flex; align-items: center; gap: 6px; padding: 0; border: 0; background: none; color: var(--soft);
  font-size: 13px;
}
.key button.off { opacity: 0.35; text-decoration: line-through; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); gap: 12px; margin-top: 20px; }
.tile .name { color: var(--soft); font-size: 13px; }
.tile .value {
  font-size: 22px; line-height: 1.4; white-space: nowrap; font-variant-numeric: tabular-nums; letter-spacing: -0.01em;
}
.tile .note { color: var(--soft); font-size: 13px; font-variant-numeric: tabular-nums; }
.tile.wide { grid-column: span 2; }
@media (max-width: 520px) { .tile.wide { grid-column: span 1; } }
.arrow { color: var(--soft); padding: 0 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: left; padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; font-size: 13px; white-space: nowrap; }
td:first-child, td:last-child { white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
td small { display: block; color: var(--soft); font-size: 12.5px; white-space: nowrap; }
.dot { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; }
.notes { margin: 16px 0 0; padding: 12px 18px 12px 34px; }
.notes li { margin: 2px 0; }
.empty { margin-top: 20px; font-size: 16px; }
.controls { display: flex; flex-wrap: wrap; gap: 12px; align-items: center; margin-bottom: 14px; }
.controls input[type=range] { flex: 1 1 200px; accent-color: #3f74d8; }
.controls output { font-variant-numeric: tabular-nums; min-width: 7em; }
button, select {
  font: inherit; color: inherit; background: var(--chip); border: 1px solid var(--line); border-radius: 7px;
  padding: 4px 12px; cursor: pointer;
}
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 14px; }
@media (max-width: 520px) { .samples { grid-template-columns: 1fr; } }
.sample { border: 1px solid var(--line); border-left: 4px solid var(--soft); border-radius: 8px; padding: 12px 14px; }
.sample.up { border-left-color: var(--good); }
.sample.down { border-left-color: var(--bad); }
.sample dl { display: grid; grid-template-columns: 4.6em 1fr; gap: 6px 10px; margin: 0; }
.sample dt { color: var(--soft); font-size: 13px; padding-top: 2px; }
.sample dd { margin: 0; min-width: 0; }
pre {
  margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 22em; overflow-y: auto;
  font: 13.5px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
}
.chips { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 10px; }
.chip {
  background: var(--chip); border-radius: 6px; padding: 1px 8px; font-size: 13px; font-variant-numeric: tabular-nums;
}
.chip b { font-weight: 600; }
details { margin-top: 12px; }
summary { cursor: pointer; font-weight: 600; }
details pre { margin-top: 10px; max-height: 40em; }
details h3 { margin: 14px 0 4px; font-size: 14px; }
"""

SCRIPT = r"""
"use strict";
const page = JSON.parse(document.getElementById("page-data").textContent);

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axis(own) {
  const line = {
    gridcolor: colour("--grid"), linecolor: colour("--line"), zerolinecolor: colour("--line"),
    tickfont: { size: 12 }, automargin: true, ticks: "",
  };
  const title = { ...own.title, font: { size: 12.5 }, standoff: 8 };
  return { ...line, ...own, title };
}

function layoutOf(figure) {
  const own = figure.layout;
  return {
    ...own,
    xaxis: axis(own.xaxis), yaxis: axis(own.yaxis),
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--soft") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 56, r: 14, t: 10, b: 44 },
    hovermode: own.barmode ? "closest" : "x unified",
    hoverlabel: {
      bgcolor: colour("--card"), bordercolor: colour("--line"), font: { size: 12, color: colour("--ink") },
    },
    autosize: true, dragmode: "zoom",
  };
}

function draw() {
  const config = {
    responsive: true, displayModeBar: false, doubleClick: "reset", showTips: false,
  };
  for (const chart of page.charts) {
    // Plotly writes into what it is given, and a change of theme draws again.
    const figure = structuredClone(chart.figure);
    Plotly.react(document.getElementById("plot-" + chart.id), figure.traces, layoutOf(figure), config);
  }
}

function keys() {
  for (const key of document.querySelectorAll(".key")) {
    const plot = document.getElementById("plot-" + key.dataset.chart);
    const hidden = (trace) =>
      [...key.querySelectorAll(".off")].some((button) => trace.meta[button.dataset.field] === button.dataset.value);
    key.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      button.classList.toggle("off");
      Plotly.restyle(plot, { visible: plot.data.map((trace) => !hidden(trace)) });
    });
  }
}

function node(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function asText(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return value;
  if (Array.isArray(value) && value.every((part) => part && typeof part === "object" && "role" in part))
    return value.map((part) => part.role + ": " + asText(part.content)).join("\n\n");
  return JSON.stringify(value);
}

function number(value, digits, signed) {
  if (value === null || value === undefined) return "none";
  const text = Number(value).toFixed(digits);
  return signed && value > 0 ? "+" + text : text;
}

function chip(name, value) {
  const made = node("span", "chip", name + " ");
  made.append(node("b", "", value));
  return made;
}

function sampleCard(sample) {
  const side = sample.advantage > 0 ? " up" : sample.advantage < 0 ? " down" : "";
  const card = node("article", "sample" + side);
  const list = node("dl");
  for (const [name, text] of [["Prompt", sample.prompt], ["Answer", sample.answer], ["Gold", sample.gold]]) {
    if (text === undefined || text === null) continue;
    list.append(node("dt", "", name));
    const cell = node("dd");
    cell.append(node("pre", "", asText(text) === "" ? "(empty)" : asText(text)));
    list.append(cell);
  }
  const chips = node("div", "chips");
  const scored = sample.reward !== null && sample.reward !== undefined;
  chips.append(chip("reward", scored ? number(sample.reward, 3) : "unscored"));
  for (const [name, value] of Object.entries(sample.components || {}))
    if (Object.keys(sample.components).length > 1) chips.append(chip(name, number(value, 3)));
  if (sample.advantage !== undefined) chips.append(chip("advantage", number(sample.advantage, 2, true)));
  if (sample.ratio !== undefined) chips.append(chip("ratio", number(sample.ratio, 5)));
  if (sample.stop_reason) chips.append(chip("stop", sample.stop_reason));
  if (sample.num_tokens !== undefined) chips.append(chip("tokens", String(sample.num_tokens)));
  if (sample.clipped) chips.append(chip("", "clipped"));
  card.append(list, chips);
  return card;
}

function showSamples() {
  const box = document.getElementById("samples");
  if (!box) return;
  const choice = document.getElementById("sample-run");
  const range = document.getElementById("sample-step");
  const label = document.getElementById("sample-label");
  const cards = document.getElementById("sample-cards");
  const shown = () => page.samples[choice ? choice.selectedIndex : 0];
  const render = () => {
    const event = shown()[Number(range.value)];
    label.textContent = event ? "step " + event.step : "no samples";
    cards.replaceChildren(...(event ? event.samples.map(sampleCard) : []));
  };
  const restart = () => {
    range.max = String(Math.max(0, shown().length - 1));
    range.value = range.max;
    render();
  };
  const move = (by) => { range.value = String(Number(range.value) + by); render(); };
  document.getElementById("sample-back").addEventListener("click", () => move(-1));
  document.getElementById("sample-next").addEventListener("click", () => move(1));
  range.addEventListener("input", render);
  if (choice) choice.addEventListener("change", restart);
  restart();
}

if (page.charts.length) draw();
keys();
showSamples();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
"""
