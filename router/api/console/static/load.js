// Load over time, in small charts of the same scale of time.

import { Chart } from "./chart.js";
import { h } from "./dom.js";
import { count, percent, seconds } from "./format.js";

const CHARTS = [
  ["Requests", count, [["in_flight", "in flight", "--accent"], ["waiting", "waiting", "--queue"]]],
  ["Tokens per second", count, [["generated_tokens_per_s", "answers", "--decode"], ["prompt_tokens_per_s", "prompts", "--prefill"]]],
  ["First token", seconds, [["ttft_p50_s", "median", "--prefill"], ["ttft_p95_s", "95 %", "--transfer"]]],
  ["Between tokens", seconds, [["itl_p50_s", "median", "--decode"], ["itl_p95_s", "95 %", "--transfer"]]],
  ["KV held", percent, [["kv_prefill", "prefill", "--prefill"], ["kv_decode", "decode", "--decode"], ["kv_both", "both", "--loading"]], 1],
  ["Ended, per second", count, [["succeeded", "done", "--good"], ["refused", "refused", "--queue"], ["failed", "failed", "--bad"]]],
];
const SPANS = [[60, "1 min"], [300, "5 min"], [900, "15 min"]];

export class LoadView {
  constructor() {
    this.span = 300;
    this.state = null;
    this.charts = CHARTS.map(([title, format, lines, top]) => new Chart(title, format, lines, top));
    const follow = (share) => this.charts.forEach((chart) => chart.point(share));
    this.charts.forEach((chart) => { chart.onPoint = follow; });
    this.buttons = SPANS.map(([span, name]) => h("button", {
      class: "button", type: "button", "aria-pressed": String(span === this.span),
      on: { click: () => this.choose(span) },
    }, name));
    this.element = h("section", { "aria-label": "Load" },
      h("div", { class: "head" }, h("h1", {}, "Load over time"),
        h("span", { class: "what" }, "latencies are of the requests that ended in the 15 s before"),
        h("div", { class: "actions", role: "group", "aria-label": "How long" }, ...this.buttons)),
      h("div", { class: "charts" }, ...this.charts.map(({ element }) => element)));
  }

  choose(span) {
    this.span = span;
    this.buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(SPANS[index][0] === span)));
    if (this.state !== null) this.update(this.state);
  }

  update(state) {
    this.state = state;
    const now = state.cluster.now_s;
    const points = state.history.filter(({ at_s: at }) => at >= now - this.span);
    this.charts.forEach((chart) => chart.draw(points, now, this.span));
  }
}
