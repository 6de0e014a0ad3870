// Values of a plot under the pointer or the arrow keys. All texts come with the plot.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const SVG = "http://www.w3.org/2000/svg";

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
  function show(plot, i) {
    const x = `${100 * plot.at[i]}%`;
    let cursor = plot.canvas.querySelector(":scope > .cursor");
    if (!cursor) {
      cursor = plot.canvas.appendChild(document.createElementNS(SVG, "line"));
      cursor.setAttribute("class", "cursor");
    }
    for (const [key, value] of Object.entries({ x1: x, x2: x, y1: "0", y2: "100%" })) cursor.setAttribute(key, value);
    plot.figure.dataset.index = i;
    const parts = plot.of.filter(([, , values]) => values[i] !== "").flatMap(([name, style, values]) => {
      const key = document.createElement("span");
      key.className = `key ${style}`;
      return [key, `${name} ${values[i]}`];
    });
    plot.figure.querySelector(".readout").replaceChildren(plot.x[i], ...parts);
  }
  function clear(plot) {
    plot.canvas.querySelector(":scope > .cursor")?.remove();
    plot.figure.querySelector(".readout").replaceChildren();
    delete plot.figure.dataset.index;
  }

  addEventListener("pointermove", (event) => {
    const plot = plotAt(event.target);
    if (plot) show(plot, nearest(plot, event));
  });
  addEventListener("pointerout", (event) => {
    const plot = plotAt(event.target);
    if (plot && !plot.canvas.contains(event.relatedTarget)) clear(plot);
  });
  addEventListener("keydown", (event) => {
    const plot = event.target.matches?.(".canvas") ? plotAt(event.target) : null;
    if (!plot) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    const last = plot.at.length - 1;
    if (event.key in moves) {
      const now = Number(plot.figure.dataset.index ?? (moves[event.key] < 0 ? last + 1 : -1));
      event.preventDefault();
      show(plot, Math.max(0, Math.min(last, now + moves[event.key])));
    } else if (event.key === "Escape") clear(plot);
  });
});
