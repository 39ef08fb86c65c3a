// KV on its way: each handoff with its state on both sides and what has arrived.

import { fill, h, keyed, vars, write } from "./dom.js";
import { NONE, bytes, count, counted, percent, seconds } from "./format.js";

const COLUMNS = [
  ["Request", ""], ["From", ""], ["To", ""], ["State", ""], ["Prompt computed", ""],
  ["KV arrived", ""], ["Age", "number"],
];

/** What a state means, as people ask it. */
const MEANINGS = {
  requested: "asked for; the source has not begun",
  queued: "the source has not begun",
  offered: "the source computes; the sink is asked for room",
  reserving: "room is being looked for",
  waiting: "the sink has no room yet",
  deferred: "the sink has no room yet",
  receiving: "KV arrives",
  streaming: "KV leaves",
  settling: "the last of it is on its way",
  completed: "all has left; the receipt is outstanding",
};

export class HandoffView {
  constructor({ ask }) {
    this.ask = ask;
    this.answer = null;
    this.what = h("span", { class: "what" });
    this.rows = h("tbody", {});
    this.table = h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ...COLUMNS.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))),
      this.rows));
    this.empty = h("p", { class: "empty" },
      "Nothing crosses at the moment. A handoff of a short prompt takes milliseconds: the map and "
      + "the requests show what has crossed.");
    this.silent = h("p", { class: "trouble", hidden: true });
    this.element = h("section", { "aria-label": "Handoffs" },
      h("div", { class: "head" }, h("h1", {}, "Handoffs in flight"), this.what),
      this.silent,
      h("div", { class: "panel" }, this.table, this.empty));
  }

  async poll() {
    this.answer = await this.ask("handoffs");
  }

  update() {
    if (this.answer === null) return;
    const { handoffs, workers_asked: asked, workers_silent: silent } = this.answer;
    write(this.what, handoffs.length ? `${counted(handoffs.length, "handoff")}, told by ${counted(asked, "worker")}` : "");
    write(this.silent, `No answer from ${silent.join(", ")}`);
    this.silent.hidden = silent.length === 0;
    this.table.hidden = handoffs.length === 0;
    this.empty.hidden = handoffs.length > 0;
    keyed(this.rows, handoffs, ({ key }) => key, makeRow, fillRow);
  }
}

function makeRow() {
  return h("tr", {},
    h("td", { class: "cut mono" }), h("td"), h("td"), h("td"),
    h("td", {}, progress("prefill")), h("td", {}, progress("transfer")), h("td", { class: "number" }));
}

function progress(kind) {
  return h("div", { class: `progress ${kind}` }, h("i"), h("span"));
}

function fillRow(row, handoff) {
  const [request, from, to, state, computed, arrived, age] = row.children;
  const name = handoff.attempt > 1 ? `${handoff.request_id} (try ${handoff.attempt})` : handoff.request_id;
  write(request, name);
  request.title = name;
  write(from, handoff.source);
  write(to, handoff.sink);
  if (state.dataset.value !== handoff.state) {
    state.dataset.value = handoff.state;
    fill(state, h("b", {}, handoff.state), h("span", { class: "note" }, ` ${MEANINGS[handoff.state] ?? ""}`));
  }
  const known = handoff.source_state !== null;
  bar(computed, known ? handoff.computed_tokens / handoff.prompt_tokens : null,
    known ? `${count(handoff.computed_tokens)} of ${count(handoff.prompt_tokens)} tokens` : `${count(handoff.prompt_tokens)} tokens`);
  const total = handoff.total_bytes;
  bar(arrived, total ? handoff.moved_bytes / total : null,
    total ? `${bytes(handoff.moved_bytes)} of ${bytes(total)}, ${percent(handoff.moved_bytes / total)}` : NONE);
  write(age, seconds(handoff.age_s));
}

function bar(cell, share, text) {
  const [fillPart, label] = cell.firstElementChild.children;
  vars(fillPart, { "--share": Math.min(share ?? 0, 1) });
  write(label, text);
}
