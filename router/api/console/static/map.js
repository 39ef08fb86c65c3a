// The map: prefill workers on one shore, decode workers on the other, KV crossing between them.

import { legend } from "./accounts.js";
import { fill, h, keyed, write } from "./dom.js";
import { ago, counted } from "./format.js";
import { Water } from "./water.js";
import { WorkerDetail } from "./worker_detail.js";
import { Sparks, fillWorker, goneCard, makeWorker } from "./worker_card.js";

const SHORES = [
  ["prefill", "Prefill", "computes prompts"],
  ["decode", "Decode", "decodes answers"],
  ["both", "Both", "prompts and answers in one process"],
];
const EVENTS_SHOWN = 12;

export class MapView {
  constructor({ ask, go }) {
    this.ask = ask;
    this.go = go;
    this.sparks = new Sparks();
    this.water = new Water();
    this.detail = new WorkerDetail(go);
    this.chosen = null;
    this.handoffs = [];
    this.shores = Object.fromEntries(SHORES.map(([role, title, what]) => [role, shore(role, title, what)]));
    this.left = h("p", { class: "note", hidden: true });
    this.events = h("ol", { class: "events" });
    this.element = h("section", { class: "map", "aria-label": "Map" },
      h("div", { class: "harbor" },
        this.shores.prefill, this.water.element, this.shores.decode, this.shores.both),
      this.left,
      legend(),
      h("div", { class: "below" },
        this.detail.element,
        h("section", { class: "panel happened" },
          h("h2", {}, "What happened"), this.events)));
  }

  /** The rest of the address: the worker that is shown in full. */
  open([worker]) {
    this.chosen = worker ?? null;
  }

  async poll({ cluster }) {
    const busy = cluster.workers.some(({ load }) => load !== null && load.handoffs > 0);
    this.handoffs = busy ? (await this.ask("handoffs")).handoffs : [];
  }

  update({ cluster, events, gone }) {
    this.sparks.note(cluster);
    const present = new Set(cluster.workers.map(({ id }) => id));
    const cards = [...cluster.workers, ...gone.filter(({ id }) => !present.has(id))];
    for (const [role] of SHORES) {
      const here = cards.filter((card) => card.role === role);
      this.shores[role].hidden = here.length === 0 && role === "both";
      const list = this.shores[role].querySelector("ul");
      keyed(list, here, ({ id }) => id, () => makeWorker((id) => this.choose(id)),
        (card, worker) => this.fillCard(card, worker, cluster.now_s));
      this.shores[role].querySelector(".none").hidden = here.length > 0;
    }
    write(this.left, `${counted(cluster.workers_left_out, "more worker")} with less to do`);
    this.left.hidden = cluster.workers_left_out === 0;
    this.detail.update(cluster.workers.find(({ id }) => id === this.chosen) ?? null, cluster);
    this.tellEvents(events, cluster.now_s);
    this.water.update(this.element, this.handoffs);
  }

  leave() {
    this.water.leave();
  }

  choose(id) {
    if (this.chosen === id) this.go("map");
    else this.go("map", id);
  }

  fillCard(card, worker, now) {
    card.classList.toggle("chosen", worker.id === this.chosen);
    if (worker.left_at_s === undefined) fillWorker(card, worker, this.sparks.of(worker.id));
    else goneCard(card, worker, now);
  }

  tellEvents(events, now) {
    const last = events.slice(-EVENTS_SHOWN).reverse();
    if (last.length === 0) {
      fill(this.events, h("li", { class: "note" }, "Nobody has come or gone since the router began to watch."));
      return;
    }
    if (this.events.keyedChildren === undefined) this.events.replaceChildren();
    keyed(this.events, last, ({ number }) => number,
      ({ kind }) => h("li", { "data-kind": kind }, h("b"), h("span"), h("time")),
      (line, event) => {
        const [who, what, when] = line.children;
        write(who, event.worker);
        write(what, event.text);
        write(when, ago(now - event.at_s));
      });
  }
}

function shore(role, title, what) {
  return h("section", { class: `shore ${role}`, "aria-label": `${title} workers` },
    h("h2", {}, h("i", { class: `glyph ${role}` }), title, h("span", { class: "note" }, what)),
    h("ul", {}),
    h("p", { class: "none note" }, "No worker has this role."));
}
