"""The learning curves of a run as one HTML file that works without a network: data, style and script inside."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from tetherl.cli.curves import AXES, Curves


def write_page(curves: Curves, path: Path, axis: str) -> None:
    """OSError when it cannot be written."""
    data = {
        "axes": {key: label for key, label in AXES.items() if key in curves.metrics},
        "axis": axis,
        "metrics": curves.metrics,
        "panels": [{"title": p.title, "series": p.series, "stacked": p.stacked} for p in curves.panels],
    }
    thinned = f", every {curves.every}. drawn" if curves.every > 1 else ""
    # "</script>" in a name would end the script early.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    filled = {"NAME": html.escape(curves.name), "ABOUT": f"{curves.iterations} iterations{thinned}", "DATA": text}
    path.write_text(re.sub("@(NAME|ABOUT|DATA)@", lambda mark: filled[mark[1]], _PAGE), encoding="utf-8")


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@NAME@</title>
<style>
:root { color-scheme: light dark; --line: #8884; --text: CanvasText; --panel: Canvas; }
body { font: 14px/1.4 system-ui, sans-serif; margin: 1rem; }
header { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; align-items: baseline; margin-bottom: .5rem; }
h1 { font-size: 1.2rem; margin: 0; } header small { opacity: .7; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(24rem, 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; position: relative; }
figcaption { font-weight: 600; } figure > button { position: absolute; top: .4rem; right: .4rem; }
svg { width: 100%; height: 15rem; display: block; touch-action: none; cursor: crosshair; }
svg text { font-size: 11px; fill: var(--text); } .grid { stroke: var(--line); }
.cursor { stroke: var(--text); opacity: .5; } .select { fill: #4a90d933; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1rem; min-height: 1.4em; }
.legend span { cursor: pointer; font-variant-numeric: tabular-nums; } .legend .off { opacity: .35; }
.legend i { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .3em; }
</style>
</head>
<body>
<header>
  <h1>@NAME@</h1><small>@ABOUT@</small>
  <label>x-axis <select id="axis"></select></label>
  <label>smoothing <input id="smooth" type="range" min="0" max="0.99" step="0.01" value="0"></label>
  <label>more <select id="more"><option value="">a metric …</option></select></label>
  <small>drag: zoom in, double click: zoom out, click a name: hide it</small>
</header>
<main></main>
<script id="data" type="application/json">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const colours = ["#4a90d9", "#e0803a", "#4fa866", "#c2579b", "#8c6fd1", "#c9a227", "#3aa6a6", "#d0504a"];
const W = 480, H = 240, LEFT = 58, RIGHT = 8, TOP = 8, BOTTOM = 22;
const state = { axis: data.axis, smooth: 0, zoom: null, hidden: new Set() };
const main = document.querySelector("main");

function svg(tag, attributes, parent) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (parent) parent.append(node);
  return node;
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return +(value / 1e6).toFixed(2) + "M";
  if (size >= 1e4) return +(value / 1e3).toFixed(1) + "k";
  return size && size < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(4));
}

function ticks(low, high) {
  const rough = (high - low) / 4 || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) found.push(t);
  return found;
}

// Exponential moving average that skips what is missing.
function smoothed(values) {
  let mean = null;
  return values.map(v => v === null ? null : (mean = mean === null ? v : state.smooth * mean + (1 - state.smooth) * v));
}

function draw(panel) {
  const xs = data.metrics[state.axis], picture = panel.picture;
  picture.replaceChildren();
  const shown = panel.series.filter(s => !state.hidden.has(s[1]));
  let lines = shown.map(s => ({ key: s[1], colour: s.colour, ys: data.metrics[s[1]] }));
  if (panel.stacked) {
    let below = xs.map(() => 0);
    for (const line of lines) {
      line.base = below;
      below = line.ys = line.ys.map((v, i) => below[i] + (v || 0));
    }
  } else {
    for (const line of lines) line.ys = smoothed(line.ys);
  }
  const known = xs.filter(x => x !== null);
  const [x0, x1] = state.zoom || [Math.min(...known), Math.max(...known)];
  const inside = i => xs[i] !== null && xs[i] >= x0 && xs[i] <= x1;
  let low = Infinity, high = -Infinity;
  for (const line of lines) for (const list of [line.ys, line.base || []]) list.forEach((v, i) => {
    if (v !== null && inside(i)) { low = Math.min(low, v); high = Math.max(high, v); }
  });
  if (low > high) [low, high] = [0, 1];
  if (low === high) { low -= 0.5; high += 0.5; }
  const px = x => LEFT + (x - x0) / (x1 - x0 || 1) * (W - LEFT - RIGHT);
  const py = y => H - BOTTOM - (y - low) / (high - low) * (H - TOP - BOTTOM);
  for (const t of ticks(low, high)) {
    svg("line", { x1: LEFT, x2: W - RIGHT, y1: py(t), y2: py(t), class: "grid" }, picture);
    svg("text", { x: LEFT - 6, y: py(t) + 4, "text-anchor": "end" }, picture).textContent = short(t);
  }
  for (const t of ticks(x0, x1))
    svg("text", { x: px(t), y: H - 6, "text-anchor": "middle" }, picture).textContent = short(t);
  const size = { width: W - LEFT - RIGHT, height: H };
  const clip = svg("svg", { x: LEFT, y: 0, ...size, viewBox: `${LEFT} 0 ${size.width} ${H}` }, picture);
  for (const line of lines) {
    const points = [], floor = [];
    line.ys.forEach((v, i) => {
      if (v === null || xs[i] === null) return;
      points.push(`${px(xs[i]).toFixed(1)},${py(v).toFixed(1)}`);
      if (line.base) floor.unshift(`${px(xs[i]).toFixed(1)},${py(line.base[i]).toFixed(1)}`);
    });
    if (line.base) svg("polygon", { points: [...points, ...floor].join(" "), fill: line.colour, opacity: 0.75 }, clip);
    else svg("polyline", { points: points.join(" "), fill: "none", stroke: line.colour, "stroke-width": 1.5 }, clip);
    if (points.length === 1) {
      const [cx, cy] = points[0].split(",");
      svg("circle", { cx, cy, r: 3, fill: line.colour }, clip);
    }
  }
  panel.cursor = svg("line", { x1: 0, x2: 0, y1: TOP, y2: H - BOTTOM, class: "cursor", visibility: "hidden" }, picture);
  panel.mark = svg("rect", { x: 0, y: TOP, width: 0, height: H - TOP - BOTTOM, class: "select" }, picture);
  panel.toX = p => x0 + (p - LEFT) / (W - LEFT - RIGHT) * (x1 - x0);
  panel.px = px;
  legend(panel, null);
}

function legend(panel, index) {
  panel.names.replaceChildren(...panel.series.map(s => {
    const name = document.createElement("span"), colour = document.createElement("i");
    colour.style.background = s.colour;
    name.classList.toggle("off", state.hidden.has(s[1]));
    name.append(colour, s[0] + (index === null ? "" : ": " + short(data.metrics[s[1]][index])));
    name.onclick = () => { state.hidden.has(s[1]) ? state.hidden.delete(s[1]) : state.hidden.add(s[1]); drawAll(); };
    return name;
  }));
  if (index !== null) panel.names.append(`${data.axes[state.axis]}: ${short(data.metrics[state.axis][index])}`);
  if (!panel.series.length) panel.names.append("no values");
}

function nearest(x) {
  let best = null, distance = Infinity;
  data.metrics[state.axis].forEach((v, i) => {
    if (v !== null && Math.abs(v - x) < distance) { distance = Math.abs(v - x); best = i; }
  });
  return best;
}

// Every panel shows the values at the place that the pointer is at in one of them.
function point(index) {
  for (const panel of panels) {
    const x = index === null ? 0 : panel.px(data.metrics[state.axis][index]);
    panel.cursor.setAttribute("visibility", index === null ? "hidden" : "visible");
    panel.cursor.setAttribute("x1", x);
    panel.cursor.setAttribute("x2", x);
    legend(panel, index);
  }
}

function add(title, series, stacked, removable) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  caption.textContent = title;
  const coloured = series.map((s, i) => Object.assign([...s], { colour: colours[i % colours.length] }));
  const panel = { stacked, series: coloured };
  panel.picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none" });
  panel.names = document.createElement("div");
  panel.names.className = "legend";
  figure.append(caption, panel.picture, panel.names);
  if (removable) {
    const close = document.createElement("button");
    close.textContent = "×";
    close.onclick = () => { figure.remove(); panels.splice(panels.indexOf(panel), 1); };
    figure.append(close);
  }
  main.append(figure);
  const at = event => {
    const box = panel.picture.getBoundingClientRect();
    return Math.min(W - RIGHT, Math.max(LEFT, (event.clientX - box.left) / box.width * W));
  };
  let from = null;
  panel.picture.onpointerdown = event => { from = at(event); panel.picture.setPointerCapture(event.pointerId); };
  panel.picture.onpointermove = event => {
    const p = at(event);
    point(nearest(panel.toX(p)));
    if (from !== null) {
      panel.mark.setAttribute("x", Math.min(from, p));
      panel.mark.setAttribute("width", Math.abs(p - from));
    }
  };
  panel.picture.onpointerup = event => {
    const p = at(event), start = from;
    from = null;
    if (start !== null && Math.abs(p - start) > 5) {
      state.zoom = [panel.toX(Math.min(start, p)), panel.toX(Math.max(start, p))];
      drawAll();
    }
  };
  panel.picture.onpointerleave = () => point(null);
  panel.picture.ondblclick = () => { state.zoom = null; drawAll(); };
  panels.push(panel);
  draw(panel);
}

const panels = [], axis = document.getElementById("axis"), more = document.getElementById("more");
const drawAll = () => panels.forEach(draw);
for (const [key, label] of Object.entries(data.axes)) axis.add(new Option(label, key, false, key === state.axis));
axis.onchange = () => { state.axis = axis.value; state.zoom = null; drawAll(); };
document.getElementById("smooth").oninput = event => { state.smooth = +event.target.value; drawAll(); };
for (const key of Object.keys(data.metrics)) more.add(new Option(key));
more.onchange = () => { if (more.value) add(more.value, [[more.value, more.value]], false, true); more.value = ""; };
for (const panel of data.panels) add(panel.title, panel.series, panel.stacked, false);
</script>
</body>
</html>
"""
