// The strip of figures below the bar: what one looks at first.

import { h, keyed, set, write } from "./dom.js";
import { NONE, count, percent, seconds } from "./format.js";

const RECENT = 10;

export class Figures {
  constructor(parent) {
    this.parent = parent;
  }

  update(state) {
    keyed(this.parent, figures(state), (figure) => figure.name, make, fillIn);
  }
}

function figures({ cluster, history }) {
  const { admission, roles } = cluster;
  const queues = Object.values(admission.queues);
  const waiting = sum(queues, "waiting");
  const refused = sum(queues, "refused");
  const all = Object.values(roles);
  const last = history.at(-1) ?? {};
  const down = sum(all, "workers") - sum(all, "reachable");
  return [
    { name: "Requests in flight", value: count(cluster.in_flight),
      note: `${count(waiting)} wait for a place` },
    { name: "Places taken", value: count(admission.places_taken), unit: `of ${count(admission.places)}`,
      note: `${count(refused)} refused so far` },
    { name: "Answers", value: rate(recent(history, "generated_tokens_per_s")), unit: "tokens/s",
      note: `${rate(recent(history, "prompt_tokens_per_s"))} prompt tokens/s` },
    { name: "First token", value: seconds(last.ttft_p50_s), unit: "median", note: `95 %: ${seconds(last.ttft_p95_s)}` },
    { name: "Between tokens", value: seconds(last.itl_p50_s), unit: "median", note: `95 %: ${seconds(last.itl_p95_s)}` },
    { name: "KV held", value: percent(sum(all, "slots_held") / sum(all, "slots_total")),
      note: `of ${count(sum(all, "slots_total"))} slots` },
    { name: "Workers", value: count(sum(all, "reachable")), unit: `of ${count(sum(all, "workers"))}`,
      note: down ? `${down} do not answer` : Object.entries(roles)
        .map(([role, { workers }]) => `${workers} ${role}`).join(", ") || "none yet",
      alarm: down > 0 || !cluster.ready },
  ];
}

function make() {
  return h("div", { class: "figure" },
    h("div", { class: "name" }), h("div", { class: "value" }), h("div", { class: "note" }));
}

function fillIn(element, { name, value, unit, note, alarm }) {
  const [title, number, below] = element.children;
  write(title, name);
  if (number.dataset.text !== `${value} ${unit}`) {
    number.replaceChildren(value, ...(unit ? [h("small", {}, unit)] : []));
    number.dataset.text = `${value} ${unit}`;
  }
  write(below, note);
  set(below, "title", note);
  element.classList.toggle("alarm", Boolean(alarm));
}

function sum(entries, field) {
  return entries.reduce((total, entry) => total + entry[field], 0);
}

/** The mean of the last samples; null before the first. */
function recent(history, field) {
  const values = history.slice(-RECENT).map((point) => point[field]).filter((v) => v !== null && v !== undefined);
  return values.length ? values.reduce((a, b) => a + b) / values.length : null;
}

function rate(value) {
  return value === null ? NONE : value < 100 ? String(Math.round(value * 10) / 10) : count(value);
}
