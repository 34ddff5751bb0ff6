// Draws and times a table of the explorer page. It knows no schedule: builders write the tables (docs/explorer_tables.py).
"use strict";

(() => {
  const tables = window.JPIPE_TABLES;
  const root = document.getElementById("explorer");
  if (!root || !tables) return;

  const CHOICES = ["schedule", "ticks", "devices", "microbatches"];
  const COSTS = ["forward", "backward", "weight_grad", "message"];
  const keys = Object.keys(tables).map((key) => key.split("/"));
  const inputs = Object.fromEntries(
    [...CHOICES, ...COSTS].map((name) => [name, root.querySelector(`[name=${name}]`)]));

  // -- Time

  function costOf(kind, costs) {
    if (kind === "D") return costs.backward + costs.weight_grad; // both gradients in one operation
    return { F: costs.forward, B: costs.backward, W: costs.weight_grad, U: 0 }[kind];
  }

  // Lockstep: a tick lasts as long as its busiest device, then messages pass.
  function timed(table, costs) {
    const operations = [];
    const busy = table.ticks[0].map(() => 0);
    let compute = 0;
    table.ticks.forEach((tick, t) => {
      const start = compute + table.waits[t] * costs.message;
      const updates = [];
      let longest = 0;
      tick.forEach((cell, device) => {
        let time = start;
        for (const word of cell ? cell.split(" ") : []) {
          const [what, stage] = word.split("@");
          const length = costOf(what[0], costs);
          const operation = { kind: what[0], microbatch: what.slice(1), stage: +stage, device, start: time, length };
          operations.push(operation);
          if (what[0] === "U") updates.push(operation);
          busy[device] += length;
          time += length;
        }
        longest = Math.max(longest, time - start);
      });
      for (const update of updates) update.start = start + longest; // all devices enter it together
      compute += longest;
    });
    const makespan = compute + table.waits[table.waits.length - 1] * costs.message;
    const total = busy.reduce((a, b) => a + b, 0);
    return { operations, makespan, bubble: makespan > 0 ? 1 - total / (busy.length * makespan) : 0 };
  }

  // -- Picture

  const SVG = "http://www.w3.org/2000/svg";
  const ROW = 26, LEFT = 64, WIDTH = 920;

  function element(parent, name, attributes, text) {
    const result = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) result.setAttribute(key, value);
    if (text !== undefined) result.textContent = text;
    return parent.appendChild(result);
  }

  function drawn(table, timing) {
    const picture = root.querySelector("svg");
    const devices = table.ticks[0].length;
    picture.replaceChildren();
    picture.setAttribute("viewBox", `0 0 ${LEFT + WIDTH} ${devices * ROW + 22}`);
    const scale = timing.makespan > 0 ? WIDTH / timing.makespan : 0;
    for (let d = 0; d < devices; d++) {
      element(picture, "text", { x: 0, y: d * ROW + 17, class: "label" }, `device ${d}`);
      element(picture, "rect", { x: LEFT, y: d * ROW + 2, width: WIDTH, height: ROW - 4, class: "idle" });
    }
    for (const o of timing.operations) {
      const x = LEFT + o.start * scale, width = o.length * scale;
      if (o.kind === "U") {
        element(picture, "rect", { x: x - 1, y: o.device * ROW, width: 2, height: ROW, class: "U" });
        continue;
      }
      const chunk = table.stages > devices && o.stage >= devices ? " second" : "";
      const box = element(picture, "rect",
        { x, y: o.device * ROW + 2, width, height: ROW - 4, class: o.kind + chunk });
      element(box, "title", {}, `${o.kind === "D" ? "B" : o.kind}${o.microbatch}, stage ${o.stage}`);
      if (width > 13) {
        element(picture, "text",
          { x: x + width / 2, y: o.device * ROW + 17, class: "number" }, o.microbatch);
      }
    }
    element(picture, "text", { x: LEFT, y: devices * ROW + 16, class: "label" }, "0");
    element(picture, "text", { x: LEFT + WIDTH, y: devices * ROW + 16, class: "label end" }, shortened(timing.makespan));
  }

  const shortened = (number) => `${+number.toFixed(3)}`;

  // -- Choices

  const numeric = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);

  // Every list offers what the choices above it allow; a choice that stays possible stays.
  function offer() {
    let left = keys;
    CHOICES.forEach((name, i) => {
      const values = [...new Set(left.map((key) => key[i]))].sort(numeric);
      const before = inputs[name].value || inputs[name].dataset.first;
      inputs[name].replaceChildren(...values.map((value) => new Option(value || "one kind", value)));
      inputs[name].value = values.includes(before) ? before : values[0];
      left = left.filter((key) => key[i] === inputs[name].value);
    });
  }

  let address; // the timer of the next change of the address
  function show() {
    offer();
    const table = tables[CHOICES.map((name) => inputs[name].value).join("/")];
    const costs = Object.fromEntries(COSTS.map((name) => [name, Math.max(0, +inputs[name].value || 0)]));
    const timing = timed(table, costs);
    drawn(table, timing);
    const facts = {
      stages: table.stages,
      makespan: `${shortened(timing.makespan)}${table.synchronous ? "" : ", of one round"}`,
      bubble: `${(100 * timing.bubble).toFixed(1)}%`,
      in_flight: table.in_flight.join(" "),
      forward_delay: table.forward_delay.join(" "),
      backward_delay: table.backward_delay.join(" "),
      weight_versions: table.weight_versions.join(" "),
    };
    for (const [name, value] of Object.entries(facts)) {
      root.querySelector(`[data-fact=${name}]`).textContent = value;
    }
    const chosen = new URLSearchParams([...CHOICES, ...COSTS].map((name) => [name, inputs[name].value]));
    // Browsers refuse an address that changes hundreds of times in a few seconds, as under a slider.
    clearTimeout(address);
    address = setTimeout(() => history.replaceState(null, "", `#${chosen}`), 200);
  }

  // An address with `#schedule=gpipe&devices=4` opens with these choices.
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const name of CHOICES) if (asked.has(name)) inputs[name].dataset.first = asked.get(name);
  for (const name of COSTS) if (asked.has(name)) inputs[name].value = asked.get(name);
  root.addEventListener("input", show);
  show();
})();
