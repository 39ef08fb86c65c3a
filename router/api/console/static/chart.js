// A line chart. What is under the pointer, or chosen with the arrow keys, is told in words.

import { h, keyed, s, set, write } from "./dom.js";
import { NONE, ago, seconds } from "./format.js";

const WIDTH = 600;
const HEIGHT = 120;
const GRID = 3;

export class Chart {
  /** `lines`: [field, name, color]; `top`: of the scale, if it is fixed. */
  constructor(title, format, lines, top = null) {
    Object.assign(this, { title, format, lines, top, points: [], now: 0, span: 1, share: null });
    this.onPoint = () => {};
    this.paths = lines.map(([, , color]) => s("path", { class: "line", stroke: `var(${color})` }));
    this.areas = lines.slice(0, 1).map(([, , color]) => s("path", { class: "fill", fill: `var(${color})` }));
    this.cross = s("line", { class: "cross", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const grid = Array.from({ length: GRID + 1 }, (_, i) =>
      s("line", { class: "grid", x1: 0, x2: WIDTH, y1: (HEIGHT * i) / GRID, y2: (HEIGHT * i) / GRID }));
    this.svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      ...grid, ...this.areas, ...this.paths, this.cross);
    this.scale = h("div", { class: "scale", "aria-hidden": "true" }, h("span"), h("span"));
    this.time = h("div", { class: "time", "aria-hidden": "true" }, h("span"), h("span", {}, "now"));
    this.values = h("ul", { class: "values" });
    this.when = h("span", { class: "note" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img" }, this.svg, this.scale);
    this.element = h("figure", { class: "panel chart" },
      h("figcaption", {}, h("h2", {}, title), this.when, this.values), this.plot, this.time);
    this.plot.addEventListener("pointermove", (event) => {
      const box = this.plot.getBoundingClientRect();
      this.onPoint(Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1));
    });
    for (const leaving of ["pointerleave", "blur"]) this.plot.addEventListener(leaving, () => this.onPoint(null));
    this.plot.addEventListener("keydown", (event) => this.pressed(event));
  }

  pressed(event) {
    const step = { ArrowLeft: -0.02, ArrowRight: 0.02 }[event.key];
    if (step === undefined) return;
    this.onPoint(Math.min(Math.max((this.share ?? 1) + step, 0), 1));
    event.preventDefault();
  }

  draw(points, now, span) {
    Object.assign(this, { points, now, span });
    const highest = Math.max(0, ...this.lines.flatMap(([field]) => points.map((point) => point[field] ?? 0)));
    const top = this.top ?? niceTop(highest);
    this.lines.forEach(([field], index) => {
      const runs = this.runs(field, top);
      set(this.paths[index], "d", runs.map((run) => `M${run.join("L")}`).join(""));
      if (index === 0) {
        set(this.areas[0], "d", runs.map((run) =>
          `M${run.join("L")}V${HEIGHT}H${run[0].split(",")[0]}Z`).join(""));
      }
    });
    write(this.scale.firstElementChild, this.format(top));
    write(this.scale.lastElementChild, "0");
    write(this.time.firstElementChild, `${seconds(span)} ago`);
    this.tell();
  }

  /** Stretches without a gap, as coordinates. */
  runs(field, top) {
    const runs = [];
    let run = [];
    for (const point of this.points) {
      const value = point[field];
      if (value === null || value === undefined) {
        if (run.length) runs.push(run);
        run = [];
      } else {
        const x = WIDTH * (1 - (this.now - point.at_s) / this.span);
        run.push(`${x.toFixed(1)},${(HEIGHT * (1 - Math.min(value / top, 1))).toFixed(1)}`);
      }
    }
    return run.length ? [...runs, run] : runs;
  }

  /** What is told is that at this share of the width; null: the latest. */
  point(share) {
    this.share = share;
    set(this.cross, "visibility", share === null ? "hidden" : "visible");
    if (share !== null) {
      set(this.cross, "x1", WIDTH * share);
      set(this.cross, "x2", WIDTH * share);
    }
    this.tell();
  }

  tell() {
    const at = this.now - this.span * (1 - (this.share ?? 1));
    const near = this.points.reduce((best, point) =>
      (best === null || Math.abs(point.at_s - at) < Math.abs(best.at_s - at) ? point : best), null);
    write(this.when, this.share === null || near === null ? "" : ago(this.now - near.at_s));
    const known = this.lines.filter(([field]) => this.points.some((point) => point[field] !== null));
    const told = (known.length ? known : this.lines).map(([field, name, color]) => ({ name, color, text: near === null ? NONE : this.format(near[field]) }));
    keyed(this.values, told, ({ name }) => name,
      ({ name, color }) => h("li", {}, h("i", { class: "dot", vars: { background: `var(${color})` } }), `${name} `, h("b")),
      (item, { text }) => write(item.lastElementChild, text));
    set(this.plot, "aria-label", `${this.title}: ${told.map(({ name, text }) => `${name} ${text}`).join(", ")}`);
  }
}

/** A round number that is not below `value`. */
export function niceTop(value) {
  if (value <= 0) return 1;
  const size = 10 ** Math.floor(Math.log10(value));
  return size * [1, 2, 3, 5, 10].find((factor) => factor * size >= value);
}
