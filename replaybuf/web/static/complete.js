// Completes names of views and columns in the box for SQL. Without it, the box is a box.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const box = document.querySelector("textarea[data-words]");
  if (!box) return;
  const views = JSON.parse(box.dataset.words);
  const KEYWORDS = ["SELECT", "FROM", "WHERE", "GROUP BY", "ORDER BY", "HAVING", "LIMIT", "JOIN", "DESC", "count(*)", "avg(", "min(", "max(", "sum("];
  const MOST = 8;
  const list = document.createElement("ul");
  list.className = "completions";
  list.id = "completions";
  list.hidden = true;
  list.setAttribute("role", "listbox");
  box.after(list);
  box.setAttribute("role", "combobox");
  box.setAttribute("aria-autocomplete", "list");
  box.setAttribute("aria-controls", list.id);
  box.setAttribute("aria-expanded", "false");
  let chosen = 0;

  function word() {
    return /\w*$/.exec(box.value.slice(0, box.selectionStart))[0];
  }
  // Columns of the views in the statement come first, then views, then those of other views.
  function candidates() {
    const text = box.value.toLowerCase();
    const named = Object.keys(views).filter((view) => new RegExp(`\\b${view}\\b`).test(text));
    const columns = (of) => of.flatMap((view) => views[view]);
    return [...new Set([...columns(named), ...Object.keys(views), ...KEYWORDS, ...columns(Object.keys(views))])];
  }
  function close() {
    list.hidden = true;
    box.setAttribute("aria-expanded", "false");
    box.removeAttribute("aria-activedescendant");
  }
  function show() {
    const begun = word().toLowerCase();
    const found = begun ? candidates().filter((one) => one.toLowerCase().startsWith(begun) && one.toLowerCase() !== begun).slice(0, MOST) : [];
    chosen = 0;
    list.replaceChildren(...found.map((one, i) => {
      const item = document.createElement("li");
      item.id = `completion-${i}`;
      item.setAttribute("role", "option");
      item.textContent = one;
      item.addEventListener("mousedown", (event) => { event.preventDefault(); chosen = i; take(); });
      return item;
    }));
    if (!found.length) { close(); return; }
    list.hidden = false;
    box.setAttribute("aria-expanded", "true");
    mark();
  }
  function mark() {
    [...list.children].forEach((item, i) => item.setAttribute("aria-selected", String(i === chosen)));
    box.setAttribute("aria-activedescendant", `completion-${chosen}`);
  }
  function take() {
    const end = box.selectionStart;
    box.setRangeText(list.children[chosen].textContent, end - word().length, end, "end");
    close();
    box.focus();
  }
  box.addEventListener("input", show);
  box.addEventListener("blur", close);
  box.addEventListener("keydown", (event) => {
    if (list.hidden || event.ctrlKey || event.metaKey) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      chosen = (chosen + step + list.children.length) % list.children.length;
      mark();
    } else if (event.key === "Tab" || event.key === "Enter") {
      take();
    } else if (event.key === "Escape") {
      close();
      event.stopPropagation();
    } else {
      return;
    }
    event.preventDefault();
  });
});
