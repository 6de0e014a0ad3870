// Everything can be read without this: it adds figures that follow the run.
"use strict";

const EVERY = 5000;
const TIMEOUT = 15000;

document.addEventListener("DOMContentLoaded", () => {
  const live = document.getElementById("live");

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
    if (!going || asking || document.hidden) return;
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
});
