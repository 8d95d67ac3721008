"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const hidden = new Set();

  // A click on a run hides it in every chart, or shows it again.
  for (const button of document.querySelectorAll("button.run")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      const show = hidden.delete(run);
      if (!show) hidden.add(run);
      button.setAttribute("aria-pressed", String(show));
      for (const part of document.querySelectorAll(`figure [data-run="${run}"]`)) part.classList.toggle("hidden", !show);
    });
  }

  const element = (name, text, parent, kind) => {
    const made = document.createElement(name);
    made.textContent = text;
    if (kind) made.className = kind;
    parent.append(made);
    return made;
  };

  const nearest = (points, step) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < step) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
  };

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = charts[figure.dataset.chart];
    const drawing = figure.querySelector(":scope > svg");
    const cursor = drawing.querySelector(".cursor");
    const tip = element("div", "", figure, "tip hidden");
    const [left, , width] = chart.plot;

    const leave = () => {
      tip.classList.add("hidden");
      cursor.setAttribute("visibility", "hidden");
    };
    const tell = (event) => {
      const box = drawing.getBoundingClientRect();
      const x = (event.clientX - box.left) * drawing.viewBox.baseVal.width / box.width;
      const span = chart.x[1] - chart.x[0];
      const step = chart.x[0] + (x - left) / width * span;
      const shown = chart.curves.filter((curve) => !hidden.has(curve.run));
      if (!shown.length || x < left - 8 || x > left + width + 8) return leave();
      const found = shown.map((curve) => [curve, nearest(curve.points, step)]);
      const here = nearest(found.map(([, point]) => point).sort((a, b) => a[0] - b[0]), step);
      tip.replaceChildren();
      element("b", `step ${here[0].toLocaleString("en")}` + (here[2] === null ? "" : `, epoch ${here[2]}`), tip);
      for (const [curve, point] of found) {
        if (Math.abs(point[0] - here[0]) > span * 0.02) continue;
        const row = element("div", "", tip, `c${curve.colour}`);
        element("span", "", row, "swatch");
        element("span", curve.label + (point[0] === here[0] ? "" : ` (step ${point[0].toLocaleString("en")})`), row);
        element("span", point[1], row);
      }
      const at = left + (here[0] - chart.x[0]) / span * width;
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      cursor.setAttribute("visibility", "visible");
      tip.classList.remove("hidden");
      const place = at * box.width / drawing.viewBox.baseVal.width + drawing.offsetLeft + (box.left - figure.getBoundingClientRect().left);
      const room = figure.clientWidth - tip.offsetWidth - 4;
      const wanted = place + 14 + tip.offsetWidth > figure.clientWidth ? place - 14 - tip.offsetWidth : place + 14;
      tip.style.left = `${Math.max(4, Math.min(room, wanted))}px`;
      tip.style.top = `${box.top - figure.getBoundingClientRect().top + 8}px`;
    };
    drawing.addEventListener("pointermove", tell);
    drawing.addEventListener("pointerdown", tell);
    drawing.addEventListener("pointerleave", leave);
  }

  // The trial under the pointer is told, and lit in all charts of its search.
  const told = document.getElementById("trials");
  const searches = told ? JSON.parse(told.textContent) : [];
  for (const search of document.querySelectorAll(".search")) {
    const trials = searches[search.dataset.search];
    for (const figure of search.querySelectorAll("figure.trials")) {
      const drawing = figure.querySelector("svg[role=img]");
      const tip = element("div", "", figure, "tip hidden");
      const leave = () => {
        tip.classList.add("hidden");
        for (const part of search.querySelectorAll(".lit")) part.classList.remove("lit");
      };
      const tell = (event) => {
        const under = event.target.closest("[data-trial]");
        const trial = under && trials[under.dataset.trial];
        leave();
        if (!trial) return;
        for (const part of search.querySelectorAll(`[data-trial="${under.dataset.trial}"]`)) part.classList.add("lit");
        tip.replaceChildren();
        element("b", trial[0], tip);
        for (const [name, value] of trial[1]) {
          const row = element("div", "", tip);
          element("span", name, row);
          element("span", value, row);
        }
        tip.classList.remove("hidden");
        const box = figure.getBoundingClientRect();
        const x = event.clientX - box.left, y = event.clientY - box.top;
        const wanted = x + 14 + tip.offsetWidth > figure.clientWidth ? x - 14 - tip.offsetWidth : x + 14;
        tip.style.left = `${Math.max(4, Math.min(figure.clientWidth - tip.offsetWidth - 4, wanted))}px`;
        tip.style.top = `${y + 14}px`;
      };
      drawing.addEventListener("pointermove", tell);
      drawing.addEventListener("pointerdown", tell);
      drawing.addEventListener("pointerleave", leave);
    }
  }
})();
