// Where the time of each request went.

import { h, keyed, set, vars, write } from "./dom.js";
import { NONE, ago, bytes, count, counted, seconds } from "./format.js";

const KINDS = [
  ["queue", "waits"], ["prefill", "prefill"], ["transfer", "transfer"], ["decode", "decode"],
];
const COUNTS = [30, 60, 120, 200];
const OUTCOMES = { client_gone: "client gone", running: "running", succeeded: "done" };

export class RequestView {
  constructor({ ask, refresh }) {
    this.ask = ask;
    this.answer = null;
    this.opened = new Set();
    this.text = h("input", { type: "search", placeholder: "id, tenant or worker", "aria-label": "Only those with" });
    this.text.addEventListener("input", () => this.update());
    this.count = h("select", { "aria-label": "How many" }, ...COUNTS.map((n) => h("option", { value: n }, `${n} requests`)));
    this.count.addEventListener("change", refresh);
    this.shared = h("input", { type: "checkbox", checked: true });
    this.shared.addEventListener("change", () => this.update());
    this.list = h("ol", { class: "requests" });
    this.empty = h("p", { class: "empty" });
    this.what = h("span", { class: "what" });
    this.element = h("section", { "aria-label": "Requests" },
      h("div", { class: "head" }, h("h1", {}, "Requests"), this.what,
        h("div", { class: "actions" }, this.text, this.count,
          h("label", { class: "check" }, this.shared, "one scale for all"))),
      h("ul", { class: "legend" }, ...KINDS.map(([kind, name]) => h("li", {}, h("i", { class: `dot phase-${kind}` }), name))),
      h("div", { class: "panel" }, this.list, this.empty));
  }

  async poll() {
    this.answer = await this.ask("requests", { count: this.count.value });
  }

  update() {
    if (this.answer === null) return;
    const { requests, now_s: now } = this.answer;
    const wanted = this.text.value.trim().toLowerCase();
    const shown = requests.filter((request) => matches(request, wanted));
    const longest = Math.max(...shown.map(({ duration_s: duration }) => duration), 1e-6);
    write(this.what, shown.length ? `${counted(shown.length, "request")}; the longest took ${seconds(longest)}` : "");
    write(this.empty, requests.length ? "None of them has that." : "Nobody has asked anything yet.");
    this.empty.hidden = shown.length > 0;
    keyed(this.list, shown, ({ id, arrived_at_s: at }) => `${id} ${at}`, (request) => this.make(request),
      (row, request) => fillRow(row, request, now, this.shared.checked ? longest : request.duration_s));
  }

  make(request) {
    const more = h("div", { class: "more", hidden: true });
    const open = h("button", { type: "button", class: "open", "aria-expanded": "false" },
      h("span", { class: "who" }, h("b", { class: "mono cut" }), h("span", { class: "note cut" })),
      h("span", { class: "way note cut" }),
      h("span", { class: "lane-bar", role: "img" }),
      h("span", { class: "took number" }), h("span", { class: "outcome" }));
    open.addEventListener("click", () => {
      more.hidden = !more.hidden;
      set(open, "aria-expanded", String(!more.hidden));
    });
    return h("li", { "data-outcome": request.outcome }, open, more);
  }
}

function matches({ id, tenant, prefill_worker: prefill, decode_worker: decode }, wanted) {
  return [id, tenant, prefill ?? "", decode ?? ""].some((text) => text.toLowerCase().includes(wanted));
}

function fillRow(row, request, now, scale) {
  set(row, "data-outcome", request.outcome);
  const [open, more] = row.children;
  const [who, way, lanes, took, outcome] = open.children;
  write(who.firstElementChild, request.id);
  write(who.lastElementChild, `${request.tenant || "no tenant"}, ${ago(now - request.arrived_at_s)}`);
  write(way, [request.prefill_worker, request.decode_worker].filter(Boolean).join(" → ") || NONE);
  write(took, seconds(request.duration_s));
  write(outcome, OUTCOMES[request.outcome] ?? request.outcome);
  set(lanes, "aria-label", request.phases.map(told).join(", ") || "no phases");
  drawPhases(lanes, request.phases, scale);
  if (!more.hidden || more.childElementCount === 0) fillMore(more, request);
}

function told({ name, place, start_s: start, end_s: end }) {
  return `${name} at ${place} ${seconds(end - start)}`;
}

function drawPhases(lanes, phases, scale) {
  keyed(lanes, phases.map((phase, index) => ({ ...phase, index })), ({ index }) => index,
    () => h("i", {}), (part, phase) => {
      part.className = `phase phase-${phase.kind}${phase.name === "prefill.queue" ? " thin" : ""}`;
      part.title = `${told(phase)}${phase.attempt ? `, try ${phase.attempt}` : ""}`;
      vars(part, { "--from": phase.start_s / scale, "--share": Math.max(phase.end_s - phase.start_s, 0) / scale });
    });
}

function fillMore(more, request) {
  const facts = [
    ["Prompt", `${count(request.prompt_tokens)} tokens, ${count(request.cached_tokens)} of them cached`],
    ["Answer", `${count(request.generated_tokens)} tokens`],
    ["First token after", seconds(request.ttft_s)],
    ["Between tokens", seconds(request.itl_s)],
    ["KV moved", bytes(request.moved_bytes)],
    ["Class", request.service_class],
    ["Tries", count(request.attempts)],
    ...(request.error ? [["Ended with", request.error]] : []),
  ];
  const rows = request.phases.map((phase) => h("tr", {},
    h("td", {}, h("i", { class: `dot phase-${phase.kind}` }), phase.name),
    h("td", {}, phase.place),
    h("td", { class: "number" }, seconds(phase.start_s)),
    h("td", { class: "number" }, seconds(phase.end_s - phase.start_s)),
    h("td", { class: "note" }, phase.attempt && `try ${phase.attempt}`)));
  more.replaceChildren(
    h("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ...["Phase", "At", "From", "Took", ""].map((name, index) =>
        h("th", { scope: "col", class: index === 2 || index === 3 ? "number" : "" }, name)))),
      h("tbody", {}, ...rows))));
}
