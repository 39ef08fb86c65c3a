// What crosses between the shores. A ferry is where its bytes are: halfway when half has arrived.

import { keyed, s, set } from "./dom.js";
import { bytes, percent } from "./format.js";

const FERRIES_MAX = 60;
/** Share of the way at each end that a ferry keeps off the shore. */
const BERTH = 0.08;

export class Water {
  constructor() {
    this.lanes = s("g", {});
    this.ferries = s("g", {});
    this.svg = s("svg", { "aria-hidden": "true" }, this.lanes, this.ferries);
    this.element = document.createElement("div");
    this.element.className = "water";
    this.element.append(this.svg);
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.element);
    this.map = null;
    this.handoffs = [];
  }

  update(map, handoffs) {
    this.map = map;
    this.handoffs = handoffs.slice(0, FERRIES_MAX);
    this.draw();
  }

  leave() {
    this.watch.disconnect();
  }

  draw() {
    if (this.map === null) return;
    const box = this.element.getBoundingClientRect();
    if (box.width === 0) return;
    set(this.svg, "viewBox", `0 0 ${box.width} ${box.height}`);
    const courses = this.handoffs
      .map((handoff) => ({ handoff, path: this.course(handoff, box) }))
      .filter(({ path }) => path !== null);
    const lanes = new Map(courses.map(({ handoff, path }) => [`${handoff.source}>${handoff.sink}`, path]));
    keyed(this.lanes, [...lanes], ([key]) => key, () => s("path", { class: "lane" }),
      (lane, [, path]) => set(lane, "d", path.d));
    keyed(this.ferries, courses, ({ handoff }) => handoff.key, ferry, (element, { handoff, path }) => {
      const share = handoff.total_bytes ? Math.min(handoff.moved_bytes / handoff.total_bytes, 1) : 0;
      const [x, y] = path.at(BERTH + (1 - 2 * BERTH) * share);
      set(element, "transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
      set(element, "data-state", handoff.state);
      element.firstElementChild.textContent =
        `${handoff.request_id}: ${bytes(handoff.moved_bytes)}, ${percent(share)}, ${handoff.state}`;
    });
  }

  /** From the card of the source to that of the sink; null if one of them is not shown. */
  course({ source, sink }, box) {
    const from = this.card(source);
    const to = this.card(sink);
    if (from === null || to === null) return null;
    const start = [from.left < box.left ? 0 : box.width, from.top + from.height / 2 - box.top];
    const end = [to.left < box.left ? 0 : box.width, to.top + to.height / 2 - box.top];
    const bend = start[0] === end[0] ? box.width * 0.7 : box.width / 2;
    const c1 = [start[0] === 0 ? bend : box.width - bend, start[1]];
    const c2 = [end[0] === 0 ? bend : box.width - bend, end[1]];
    const d = `M${start}C${c1} ${c2} ${end}`;
    return { d, at: (t) => bezier(t, start, c1, c2, end) };
  }

  card(worker) {
    const card = this.map.querySelector(`.worker[data-id="${CSS.escape(worker)}"]`);
    return card === null ? null : card.getBoundingClientRect();
  }
}

function ferry() {
  return s("g", { class: "ferry" }, s("title", {}),
    s("path", { d: "M-11-1h22l-4 7h-14z" }), s("path", { class: "cargo", d: "M-6-7h12v5h-12z" }));
}

function bezier(t, a, b, c, d) {
  const u = 1 - t;
  return [0, 1].map((i) => u ** 3 * a[i] + 3 * u * u * t * b[i] + 3 * u * t * t * c[i] + t ** 3 * d[i]);
}
