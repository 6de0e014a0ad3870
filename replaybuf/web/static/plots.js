// Values of a plot under the pointer or the arrow keys, and a part of it: what is dragged over goes into the address,
// and the server draws it. All texts come with the plot.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const SVG = "http://www.w3.org/2000/svg";
  const LEAST_DRAG = 8;
  let drag = null;

  function plotAt(target) {
    const canvas = target.closest?.(".canvas");
    const figure = canvas?.closest("[data-plot]");
    if (!figure) return null;
    figure.plot ??= JSON.parse(figure.dataset.plot);
    return { figure, canvas, ...figure.plot };
  }
  function nearest(plot, event) {
    const box = plot.canvas.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width;
    let best = 0;
    plot.at.forEach((one, i) => { if (Math.abs(one - place) < Math.abs(plot.at[best] - place)) best = i; });
    return best;
  }
  function shape(canvas, name, kind, attributes) {
    let found = canvas.querySelector(`:scope > .${name}`);
    if (!found) {
      found = canvas.appendChild(document.createElementNS(SVG, kind));
      found.setAttribute("class", name);
    }
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  }
  function show(plot, i) {
    const x = `${100 * plot.at[i]}%`;
    shape(plot.canvas, "cursor", "line", { x1: x, x2: x, y1: "0", y2: "100%" });
    plot.figure.dataset.index = i;
    const parts = plot.of.filter(([, , values]) => values[i] !== "").flatMap(([name, style, values]) => {
      const key = document.createElement("span");
      key.className = `key ${style}`;
      return [key, `${name} ${values[i]}`];
    });
    plot.figure.querySelector(".readout").replaceChildren(plot.x[i], ...parts);
  }
  function clear(plot) {
    plot.canvas.querySelectorAll(":scope > .cursor, :scope > .chosen").forEach((one) => one.remove());
    plot.figure.querySelector(".readout").replaceChildren();
    delete plot.figure.dataset.index;
  }
  function go(from, to) {
    const there = new URL(location.href);
    for (const [name, value] of [["from", from], ["to", to], ["before", null]]) {
      if (value === null) there.searchParams.delete(name);
      else there.searchParams.set(name, value);
    }
    if (there.href !== location.href) location.href = there.href;
  }

  addEventListener("pointerdown", (event) => {
    const plot = plotAt(event.target);
    if ((plot?.zoom || plot?.to) && event.button === 0) drag = { plot, x: event.clientX, first: nearest(plot, event) };
  });
  addEventListener("pointermove", (event) => {
    const plot = drag?.plot ?? plotAt(event.target);
    if (!plot) return;
    const i = nearest(plot, event);
    show(plot, i);
    if (!drag?.plot.zoom || Math.abs(event.clientX - drag.x) < LEAST_DRAG) return;
    const [low, high] = [plot.at[drag.first], plot.at[i]].sort((a, b) => a - b);
    const across = { x: `${100 * low}%`, width: `${100 * (high - low)}%` };
    shape(plot.canvas, "chosen", "rect", { ...across, y: "0", height: "100%" });
  });
  addEventListener("pointerup", (event) => {
    if (!drag) return;
    const { plot, x, first } = drag;
    drag = null;
    const last = nearest(plot, event);
    if (Math.abs(event.clientX - x) < LEAST_DRAG) {
      if (plot.to) location.href = plot.to[last];
      return;
    }
    if (first === last || !plot.zoom) return;
    const [from, to] = [plot.zoom[first], plot.zoom[last]].sort((a, b) => a - b);
    go(from, to);
  });
  addEventListener("pointercancel", () => { drag = null; });
  addEventListener("pointerout", (event) => {
    const plot = plotAt(event.target);
    if (plot && !drag && !plot.canvas.contains(event.relatedTarget)) clear(plot);
  });
  addEventListener("dblclick", (event) => { if (plotAt(event.target)?.zoom) go(null, null); });
  addEventListener("keydown", (event) => {
    const plot = event.target.matches?.(".canvas") ? plotAt(event.target) : null;
    if (!plot) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    const last = plot.at.length - 1;
    if (event.key in moves) {
      const now = Number(plot.figure.dataset.index ?? (moves[event.key] < 0 ? last + 1 : -1));
      event.preventDefault();
      show(plot, Math.max(0, Math.min(last, now + moves[event.key])));
    } else if (event.key === "Enter" && plot.to && plot.figure.dataset.index) {
      location.href = plot.to[Number(plot.figure.dataset.index)];
    } else if (event.key === "Escape") clear(plot);
  });
});
