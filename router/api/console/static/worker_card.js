// One worker on the map: who it is, how it is, what it holds and what it does.

import { bar, held, paint } from "./accounts.js";
import { h, s, set, write } from "./dom.js";
import { NONE, ago, count, percent } from "./format.js";

const SPARK_POINTS = 60;
const SPARK_HEIGHT = 18;

const NUMBERS = [
  ["running", "running", "requests in the batch"],
  ["waiting", "waiting", "requests that wait for it"],
  ["handoffs", "handoffs", "not closed, on either side"],
  ["held", "KV held", "neither free nor evictable"],
];

/** What a worker held lately, for as long as the page is open. */
export class Sparks {
  constructor() {
    this.values = new Map();
  }

  note(cluster) {
    for (const { id, accounts } of cluster.workers) {
      const list = this.values.get(id) ?? [];
      list.push(accounts === null ? 0 : held(accounts) / Math.max(accounts.total, 1));
      this.values.set(id, list.slice(-SPARK_POINTS));
    }
  }

  of(id) {
    return this.values.get(id) ?? [];
  }
}

export function makeWorker(choose) {
  const open = h("button", { class: "open", type: "button" },
    h("i", { class: "glyph" }), h("b", { class: "id" }), h("span", { class: "state" }));
  const card = h("li", { class: "worker" }, open, bar(),
    h("dl", { class: "numbers" }, ...NUMBERS.map(([name, title, what]) =>
      h("div", { title: what }, h("dt", {}, title), h("dd", { "data-number": name })))),
    s("svg", { class: "spark", viewBox: `0 0 ${SPARK_POINTS - 1} ${SPARK_HEIGHT}`,
      preserveAspectRatio: "none", "aria-hidden": "true" }, s("path", { class: "area" }), s("path", { class: "stroke" })));
  open.addEventListener("click", () => choose(card.dataset.id));
  return card;
}

export function fillWorker(card, worker, spark) {
  const { load, accounts } = worker;
  head(card, worker, ...stateOf(worker));
  paint(card.querySelector(".accounts"), accounts);
  const share = accounts === null ? null : held(accounts) / Math.max(accounts.total, 1);
  const values = {
    running: load === null ? NONE : count(load.running),
    waiting: load === null ? NONE : count(load.waiting),
    handoffs: load === null ? NONE : count(load.handoffs),
    held: percent(share),
  };
  for (const field of card.querySelectorAll("[data-number]")) write(field, values[field.dataset.number]);
  draw(card.querySelector(".spark"), spark);
}

/** One that left: where it was, until nobody wonders any more. */
export function goneCard(card, worker, now) {
  head(card, worker, "gone", `left ${ago(now - worker.left_at_s)}`);
  paint(card.querySelector(".accounts"), null);
  for (const field of card.querySelectorAll("[data-number]")) write(field, NONE);
  draw(card.querySelector(".spark"), []);
}

function stateOf(worker) {
  if (!worker.reachable) return worker.load === null ? ["silent", "starting"] : ["silent", "does not answer"];
  if (worker.draining) return ["draining", "draining"];
  return worker.load.running + worker.load.waiting > 0 ? ["busy", "at work"] : ["idle", "idle"];
}

function head(card, worker, state, text) {
  set(card, "data-id", worker.id);
  set(card, "data-state", state);
  card.querySelector(".glyph").className = `glyph ${worker.role}`;
  write(card.querySelector(".id"), worker.id);
  write(card.querySelector(".state"), text);
  set(card.querySelector(".open"), "aria-label", `${worker.id}, ${worker.role}, ${text}`);
}

function draw(spark, values) {
  const from = SPARK_POINTS - values.length;
  const points = values.map((share, index) =>
    `${from + index},${(SPARK_HEIGHT - 1 - share * (SPARK_HEIGHT - 2)).toFixed(2)}`);
  const [area, stroke] = spark.children;
  const line = points.length > 1 ? `M${points.join("L")}` : "";
  set(stroke, "d", line);
  set(area, "d", line && `${line}V${SPARK_HEIGHT}H${from}Z`);
}
