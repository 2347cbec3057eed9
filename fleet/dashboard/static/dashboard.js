// Replaces parts of the page as the server sends them, and keeps what the reader was doing.
"use strict";

const connection = document.getElementById("connection");
const pending = new Map();

function isInUse(section) {
  const selection = document.getSelection();
  return section.matches(":active") || (!selection.isCollapsed && section.contains(selection.anchorNode));
}

function replace(section, html) {
  const focus = section.contains(document.activeElement) ? document.activeElement.id : "";
  const checked = [...section.querySelectorAll("input:checked")].map((input) => input.id);
  const places = [...section.querySelectorAll("[tabindex]")].map((area) => [area.scrollLeft, area.scrollTop]);
  section.innerHTML = html;
  for (const id of checked) {
    const input = document.getElementById(id);
    if (input) input.checked = true;
  }
  section.querySelectorAll("[tabindex]").forEach((area, index) => {
    if (places[index]) [area.scrollLeft, area.scrollTop] = places[index];
  });
  if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
}

function show() {
  for (const [part, html] of pending) {
    const section = document.querySelector(`[data-part="${part}"]`);
    if (section && isInUse(section)) continue;
    if (section) replace(section, html);
    pending.delete(part);
  }
}

if (document.body.dataset.events) {
  const source = new EventSource(document.body.dataset.events);
  source.onopen = () => (connection.textContent = "");
  source.onerror = () => (connection.textContent = "No connection: what you see may be old.");
  source.onmessage = (event) => {
    for (const [part, html] of Object.entries(JSON.parse(event.data))) pending.set(part, html);
    show();
  };
  setInterval(show, 500); // what was in use when its news came
}
