// Everything can be read without this: it adds the theme's button, keys, and figures that follow the run.
"use strict";

const EVERY = 5000;
const TIMEOUT = 15000;
const root = document.documentElement;
let theme = null;
try { theme = localStorage.getItem("theme"); } catch { /* storage is off */ }
if (theme === "light" || theme === "dark") root.dataset.theme = theme;

document.addEventListener("DOMContentLoaded", () => {
  const button = (id) => document.getElementById(id);
  const live = button("live");
  const dialog = button("keys");

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function switchTheme() {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* it lasts as long as the page */ }
  }
  button("theme").hidden = button("help").hidden = false;
  button("theme").addEventListener("click", switchTheme);
  button("help").addEventListener("click", () => dialog.showModal());

  // Live figures: the same page once more, of which the parts that change are put in place of those that are here.
  const parts = document.querySelectorAll("[data-live]");
  let going = parts.length > 0;
  let asking = false;
  if (going) { live.hidden = false; live.addEventListener("click", pause); }

  function pause() {
    going = !going;
    live.setAttribute("aria-pressed", String(going));
    if (going) refresh();
  }
  function isInUse(part) {
    const selects = !getSelection().isCollapsed && part.contains(getSelection().anchorNode);
    return part.contains(document.activeElement) || part.querySelector(".cursor") !== null || selects;
  }
  async function refresh() {
    if (!going || asking || document.hidden || dialog.open) return;
    asking = true;
    try {
      const answer = await fetch(location.href, { signal: AbortSignal.timeout(TIMEOUT), cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const part of parts) {
        const now = page.getElementById(part.id);
        if (!now || isInUse(part)) continue;
        const scrolled = [...part.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
        part.replaceChildren(...now.childNodes);
        part.querySelectorAll(".scroll").forEach((one, i) => { one.scrollLeft = scrolled[i] ?? 0; });
      }
      live.dataset.idle = page.getElementById("live").dataset.idle;
      say(live.dataset.idle || "live", false);
    } catch {
      say("no answer", true);
    } finally {
      asking = false;
    }
  }
  function say(text, lost) {
    live.textContent = text;
    live.classList.toggle("lost", lost);
  }
  if (going) {
    setInterval(refresh, EVERY);
    document.addEventListener("visibilitychange", refresh);
  }

  // Keys
  const places = { o: "overview", g: "groups", s: "steps", c: "checkpoints", w: "workers", e: "events" };
  let goingTo = 0;
  function row(step) {
    const rows = [...document.querySelectorAll("[data-row]")];
    const at = rows.indexOf(document.activeElement);
    const next = rows[at < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + step))];
    if (next) next.focus();
  }
  const keys = {
    "?": () => dialog.showModal(),
    "/": () => (button("where") ? button("where").focus() : document.querySelector("[data-page=groups]").click()),
    j: () => row(1),
    k: () => row(-1),
    n: () => document.querySelector("[rel=next]")?.click(),
    r: () => { if (parts.length) pause(); },
    t: switchTheme,
    g: () => { goingTo = Date.now(); },
  };
  document.addEventListener("keydown", (event) => {
    const field = event.target.closest?.("input, textarea, select");
    if (field && event.key === "Enter" && (event.ctrlKey || event.metaKey)) field.form?.requestSubmit();
    if (field && event.key === "Escape") field.blur();
    if (field || dialog.open || event.ctrlKey || event.metaKey || event.altKey) return;
    if (Date.now() - goingTo < 1500 && places[event.key]) {
      goingTo = 0;
      event.preventDefault();
      document.querySelector(`nav [data-page=${places[event.key]}]`)?.click();
    } else if (keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
    }
  });
});
