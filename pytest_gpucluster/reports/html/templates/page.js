// Sorting, searching and opening. The page is complete without this script.
"use strict";
(function () {
  const table = document.getElementById("criteria-table");
  document.documentElement.classList.add("js");
  if (table === null) return;
  const bodies = Array.from(table.tBodies);
  const find = document.getElementById("find");
  const matches = document.getElementById("matches");
  const chips = Array.from(document.querySelectorAll("[data-outcome][aria-pressed]"));

  function open(body, yes) {
    const details = body.querySelector("tr.more details");
    if (details === null) return;
    body.classList.toggle("open", yes);
    details.open = yes;
    body.querySelector(".toggle").setAttribute("aria-expanded", String(yes));
  }

  for (const body of bodies) {
    const more = body.querySelector("tr.more");
    if (more === null) continue;
    more.id = body.id + "-more";
    const name = body.querySelector(".name");
    const toggle = document.createElement("button");
    toggle.type = "button";
    toggle.className = "toggle";
    toggle.setAttribute("aria-expanded", "false");
    toggle.setAttribute("aria-controls", more.id);
    toggle.textContent = name.textContent;
    name.textContent = "";
    name.append(toggle);
    body.addEventListener("click", function (event) {
      // Selecting text in the row must not open it.
      if (event.target.closest("a, tr.more") !== null || String(window.getSelection()) !== "") return;
      open(body, !body.classList.contains("open"));
    });
  }

  function key(body, name) {
    const text = body.dataset[name];
    if (name === "name" || name === "who") return text;
    return text === "" ? NaN : Number(text);
  }

  function compare(a, b) {
    if (typeof a === "string") return a.localeCompare(b, "en", { numeric: true });
    return a - b;
  }

  function sort(header, name, descending) {
    // Rows without a value come last in both directions; equal rows keep the order of the page.
    const keyed = bodies.map((body, index) => ({ body, index, key: key(body, name) }));
    const empty = (each) => each.key === "" || Number.isNaN(each.key);
    keyed.sort(function (a, b) {
      if (empty(a) || empty(b)) return Number(empty(a)) - Number(empty(b)) || a.index - b.index;
      return (descending ? -1 : 1) * compare(a.key, b.key) || a.index - b.index;
    });
    for (const each of keyed) table.append(each.body);
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  }

  for (const header of table.tHead.rows[0].cells) {
    const name = header.dataset.sort;
    if (name === undefined) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sorter";
    button.textContent = header.textContent;
    header.textContent = "";
    header.append(button);
    button.addEventListener("click", function () {
      sort(header, name, header.getAttribute("aria-sort") === "ascending");
    });
  }

  function filter() {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const outcomes = new Set(chips.filter((chip) => chip.getAttribute("aria-pressed") === "true").map((chip) => chip.dataset.outcome));
    let count = 0;
    for (const body of bodies) {
      const seen = Array.from(body.rows).filter((row) => !row.classList.contains("more"));
      const text = seen.map((row) => row.textContent).join(" ").toLowerCase();
      const fits = outcomes.has(body.dataset.outcome) && words.every((word) => text.includes(word));
      body.hidden = !fits;
      if (fits) count += 1;
    }
    matches.textContent = count === bodies.length ? "" : count + " of " + bodies.length + " shown";
  }

  find.addEventListener("input", filter);
  for (const chip of chips) {
    chip.addEventListener("click", function () {
      chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
      filter();
    });
  }
  document.getElementById("open-all").addEventListener("click", () => bodies.forEach((body) => open(body, true)));
  document.getElementById("close-all").addEventListener("click", () => bodies.forEach((body) => open(body, false)));

  // Browsers that do not print closed details by style alone.
  let closed = [];
  window.addEventListener("beforeprint", function () {
    closed = Array.from(document.querySelectorAll("details:not([open])"));
    closed.forEach((details) => { details.open = true; });
  });
  window.addEventListener("afterprint", () => closed.forEach((details) => { details.open = false; }));

  function opened() {
    const body = bodies.find((each) => "#" + each.id === location.hash);
    if (body !== undefined) {
      body.hidden = false;
      open(body, true);
      body.scrollIntoView();
    }
  }
  window.addEventListener("hashchange", opened);
  document.querySelector(".controls").hidden = false;
  opened();
})();
