// All that is known of one worker, as a table.

import { ACCOUNTS, HOST_ACCOUNTS, bar, paint } from "./accounts.js";
import { fill, h } from "./dom.js";
import { bytes, count, percent } from "./format.js";

export class WorkerDetail {
  constructor(go) {
    this.go = go;
    this.element = h("section", { class: "panel detail", "aria-live": "off" });
    this.drawn = "";
  }

  update(worker, cluster) {
    const drawn = JSON.stringify(worker);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const focused = document.activeElement?.dataset?.action;
    if (worker === null) fill(this.element, h("h2", {}, "A worker in full"), hint(cluster));
    else fill(this.element, ...this.lines(worker));
    if (focused) this.element.querySelector(`[data-action="${focused}"]`)?.focus();
  }

  lines(worker) {
    const { load } = worker;
    const facts = [
      ["Role", worker.role + (worker.draining ? ", draining" : "")],
      ["Answers", worker.reachable ? "yes" : "no: what is shown is its last word"],
      ["Incarnation", worker.incarnation],
      ["Address", worker.address],
      ["Process", worker.pid === null ? "–" : String(worker.pid)],
      ["Prompt tokens to compute", count(load?.waiting_tokens)],
      ["Computes prompts at", load?.prefill_tokens_per_s ? `${count(load.prefill_tokens_per_s)} tokens/s` : "–"],
      ["Receives KV at", load?.link_bytes_per_s ? `${bytes(load.link_bytes_per_s)}/s` : "–"],
      ["Rows", worker.accounts === null ? "–"
        : `${count(worker.accounts.rows_live)} of ${count(worker.accounts.rows_total)} live`],
      ["Blocks the router knows of", worker.events_known ? count(worker.indexed_blocks) : "unknown"],
    ];
    return [
      h("h2", {}, h("i", { class: `glyph ${worker.role}` }), worker.id,
        action("tree", "Its tree", () => this.go("trees", worker.id)),
        action("close", "Close", () => this.go("map"))),
      h("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      ...accountTable("KV slots by owner", ACCOUNTS, worker.accounts),
      ...accountTable("Slots of the host tier", HOST_ACCOUNTS, worker.host_accounts),
    ];
  }
}

function hint(cluster) {
  const text = cluster.workers.length ? "Choose a worker above." : "There are no workers yet.";
  return h("p", { class: "empty" }, text);
}

function action(name, text, run) {
  return h("button", { class: "button", type: "button", "data-action": name, on: { click: run } }, text);
}

function accountTable(title, list, accounts) {
  if (accounts === null) return [];
  const whole = bar(list);
  paint(whole, accounts);
  const rows = list.map(([color, field, what]) => h("tr", {},
    h("td", {}, h("i", { class: `dot ${color}` }), field),
    h("td", { class: "number" }, count(accounts[field])),
    h("td", { class: "number note" }, percent(accounts[field] / Math.max(accounts.total, 1))),
    h("td", { class: "note what" }, what)));
  const pinned = accounts.outbound_pinned
    ? h("p", { class: "note pinned" },
      `${count(accounts.outbound_pinned)} of them are pinned by handoffs that read them.`)
    : null;
  return [h("h3", { class: "sub" }, title), whole, h("table", {}, h("tbody", {}, ...rows)), ...(pinned ? [pinned] : [])];
}
