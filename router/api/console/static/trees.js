// The radix tree of one worker: which prefixes it holds, how hot they are, who may evict them.

import { fill, h, keyed, set, vars, write } from "./dom.js";
import { count, counted, short } from "./format.js";
import { hottest, layOut, saved, stateOf } from "./tree_layout.js";

const STATES = [
  ["locked", "in use", "a request reads it: protected"],
  ["evictable", "cached", "nobody reads it: evictable"],
  ["both", "cached, host too", "evictable, and on the host tier as well"],
  ["host", "host only", "it has to be loaded back"],
  ["empty", "given up", "a path leads through it; its slots are gone"],
];
const NODES = [50, 100, 200, 500, 1000];
const ROW = 22;
const HOT = 8;
const TOKENS = 24;
const EVERY = 3;

export class TreeView {
  constructor({ ask, go, refresh }) {
    Object.assign(this, { ask, go, refresh, worker: null, path: [], answer: null, problem: null, turns: 0, drawn: null, focus: null });
    this.pick = h("select", { "aria-label": "Worker", on: { change: () => go("trees", this.pick.value) } });
    this.nodes = h("select", { "aria-label": "How many nodes" }, ...NODES.map((n) => h("option", { value: n, selected: n === 100 }, `${n} nodes`)));
    this.nodes.addEventListener("change", () => this.again());
    this.text = h("input", { type: "checkbox" });
    this.text.addEventListener("change", () => this.again());
    this.what = h("span", { class: "what" });
    this.crumbs = h("nav", { class: "crumbs", "aria-label": "Where this begins" });
    this.bars = h("div", { class: "tree", role: "tree", "aria-label": "Cached prefixes" });
    this.bars.addEventListener("keydown", (event) => this.pressed(event));
    this.empty = h("p", { class: "empty", hidden: true });
    this.hot = h("ol", { class: "hot" });
    this.info = h("div", { class: "info" });
    this.element = h("section", { "aria-label": "Trees" },
      h("div", { class: "head" }, h("h1", {}, "Radix tree of"), this.pick, this.what,
        h("div", { class: "actions" }, this.nodes, h("label", { class: "check" }, this.text, "show texts"))),
      h("ul", { class: "legend" }, ...STATES.map(([state, name, why]) =>
        h("li", { title: why }, h("i", { class: `dot node-${state}` }), h("b", {}, name))),
      h("li", {}, "width: tokens, compressed; dark edge: hits")),
      h("div", { class: "forest" },
        h("div", { class: "panel" }, this.crumbs, h("div", { class: "scroll" }, this.bars), this.empty),
        h("aside", {},
          h("section", { class: "panel" }, h("h2", {}, "Hottest prefixes"), this.hot),
          h("section", { class: "panel" }, h("h2", {}, "Node"), this.info))));
    this.describe(null);
  }

  /** The rest of the address: the worker, then ids of nodes with points between. */
  open([worker, path]) {
    if (worker !== undefined && worker !== this.worker) {
      Object.assign(this, { worker, answer: null, drawn: null });
    }
    this.path = path ? path.split(".") : [];
    this.turns = 0;
  }

  again() {
    this.turns = 0;
    this.refresh();
  }

  async poll({ cluster }) {
    this.worker ??= cluster.workers.find(({ reachable }) => reachable)?.id ?? null;
    // A view keeps the engine from its work for a moment: not more often than anybody can read.
    if (this.worker === null || this.turns++ % EVERY !== 0) return;
    const asked = { nodes: this.nodes.value, path: this.path.join(".") || null };
    if (this.text.checked) Object.assign(asked, { tokens: TOKENS, text: true });
    this.problem = null;
    try {
      this.answer = await this.ask(`workers/${encodeURIComponent(this.worker)}/tree`, asked);
    } catch (error) {
      if (error.needsKey) throw error;
      this.problem = error.message;
    }
  }

  update({ cluster }) {
    const names = [...new Set([...cluster.workers.map(({ id }) => id), ...(this.worker ? [this.worker] : [])])];
    keyed(this.pick, names, (name) => name, (name) => h("option", { value: name }, name), () => {});
    if (this.worker !== null) this.pick.value = this.worker;
    if (this.problem !== null) {
      this.say(`${this.problem}.`);
    } else if (this.answer !== null && this.answer !== this.drawn) {
      this.drawn = this.answer;
      this.draw(this.answer);
    } else if (this.worker === null) {
      this.say("There are no workers yet.");
    }
  }

  say(text) {
    write(this.empty, text);
    this.empty.hidden = false;
    fill(this.bars);
  }

  draw(tree) {
    const { boxes, rows } = layOut(tree.nodes, tree.path);
    const held = tree.evictable + tree.protected;
    write(this.what, `${counted(tree.nodes.length, "node")}${tree.whole ? "" : ", the most used of more"}; `
      + `${count(held)} tokens held, ${count(tree.protected)} in use; took ${short(tree.duration_ms)} ms`);
    this.drawCrumbs(tree);
    this.empty.hidden = boxes.length > 0;
    write(this.empty, tree.path.length ? "Nothing is below this node." : "Nothing is cached here yet.");
    this.boxes = boxes;
    const hits = Math.max(1, ...boxes.map(({ node }) => node.hits));
    if (!boxes.some(({ node }) => node.id === this.focus)) this.focus = boxes[0]?.node.id ?? null;
    vars(this.bars, { "--rows": rows, "--row": `${ROW}px` });
    keyed(this.bars, boxes, ({ node }) => node.id, () => this.makeNode(), (bar, box) => this.fillNode(bar, box, hits));
    const hot = hottest(boxes, HOT);
    keyed(this.hot, hot, ({ node }) => node.id, ({ node }) => h("li", {},
      h("button", { type: "button", on: { click: () => this.zoom(node.id) } }, h("b"), h("span", { class: "note" }))),
    (item, box) => {
      const [title, note] = item.firstElementChild.children;
      write(title, label(box.node));
      write(note, `${counted(box.node.hits, "hit")}, ${count(saved(box))} tokens not computed`);
    });
    if (hot.length === 0) fill(this.hot, h("li", { class: "note" }, "No prefix was hit yet."));
    this.describe(boxes.find(({ node }) => node.id === this.focus) ?? null);
  }

  drawCrumbs({ path, path_tokens: tokens }) {
    const steps = ["", ...path].map((_, index) => path.slice(0, index));
    const from = Math.max(1, steps.length - 6);
    fill(this.crumbs, ...[steps[0], ...steps.slice(from)].map((step, index, all) => {
      const last = index === all.length - 1;
      const text = index === 0 ? "root" : `node ${step.at(-1)}`;
      return last ? h("b", {}, index === 0 ? text : `${text}, from token ${count(tokens)} on`)
        : h("button", { type: "button", on: { click: () => this.go("trees", this.worker, step.join(".")) } }, text);
    }));
  }

  makeNode() {
    const bar = h("div", { class: "node", role: "treeitem", tabindex: "-1" }, h("span"));
    bar.addEventListener("focus", () => this.choose(bar.dataset.id));
    bar.addEventListener("click", () => bar.focus());
    bar.addEventListener("dblclick", () => this.zoom(bar.dataset.id));
    return bar;
  }

  fillNode(bar, box, hits) {
    const { node } = box;
    set(bar, "data-id", node.id);
    set(bar, "tabindex", node.id === this.focus ? "0" : "-1");
    set(bar, "aria-selected", String(node.id === this.focus));
    set(bar, "aria-level", depth(box));
    set(bar, "aria-expanded", node.children ? String(box.below.length > 0) : null);
    bar.className = `node node-${stateOf(node)}`;
    vars(bar, {
      "--x": box.x, "--width": box.width, "--at": box.row, "--rows": box.rows,
      "--heat": Math.log1p(node.hits) / Math.log1p(hits),
    });
    const hidden = node.children - box.below.length;
    write(bar.firstElementChild, `${label(node)}${hidden > 0 ? `  +${count(hidden)}` : ""}`);
    const text = `${label(node)}: tokens ${node.start} to ${node.start + node.length}, `
      + `${counted(node.hits, "hit")}, ${nameOf(node)}`;
    set(bar, "aria-label", text);
    set(bar, "title", text);
  }

  choose(id) {
    this.focus = id;
    for (const bar of this.bars.children) {
      const chosen = bar.dataset.id === id;
      set(bar, "tabindex", chosen ? "0" : "-1");
      set(bar, "aria-selected", String(chosen));
    }
    this.describe(this.boxes.find(({ node }) => node.id === id) ?? null);
  }

  zoom(id) {
    const path = [];
    for (let box = this.boxes.find(({ node }) => node.id === id); box; box = box.parent) path.unshift(box.node.id);
    this.go("trees", this.worker, [...this.answer.path, ...path].join("."));
  }

  pressed(event) {
    const index = this.boxes?.findIndex(({ node }) => node.id === this.focus) ?? -1;
    if (index < 0) {
      if (event.key !== "Backspace") return;
    }
    const box = this.boxes[index];
    const to = {
      ArrowLeft: () => box.parent, ArrowRight: () => box.below[0],
      ArrowDown: () => this.boxes[index + 1], ArrowUp: () => this.boxes[index - 1],
      Home: () => this.boxes[0], End: () => this.boxes.at(-1),
    }[event.key]?.();
    if (to) [...this.bars.children].find((bar) => bar.dataset.id === to.node.id)?.focus();
    else if (event.key === "Enter" && box.node.children) this.zoom(this.focus);
    else if (event.key === "Backspace" && this.path.length) this.go("trees", this.worker, this.path.slice(0, -1).join("."));
    else if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
  }

  describe(box) {
    if (box === null) {
      fill(this.info, h("p", { class: "note" }, "Choose a node: click it, or use the arrow keys."));
      return;
    }
    const { node } = box;
    const facts = [
      ["State", nameOf(node)], ["Tokens", `${count(node.start)} to ${count(node.start + node.length)} (${count(node.length)})`],
      ["Hits", count(node.hits)], ["Read by", counted(node.locks, "request")],
      ["Children", count(node.children)], ["Tiers", [node.device && "device", node.host && "host"].filter(Boolean).join(", ") || "none"],
      ...(node.priority ? [["Priority", String(node.priority)]] : []),
      ...(node.namespace ? [["Shared within", node.namespace]] : []),
    ];
    fill(this.info,
      h("dl", { class: "facts one" }, ...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      ...(node.text === null ? [] : [h("pre", { class: "text" }, node.text)]),
      ...(node.children ? [h("button", { type: "button", class: "button", on: { click: () => this.zoom(node.id) } }, "Zoom in")] : []));
  }
}

function label({ text, length }) {
  return text === null || text === "" ? `${count(length)} tokens` : text.replace(/\s+/g, " ");
}

function nameOf(node) {
  const [, name, why] = STATES.find(([state]) => state === stateOf(node));
  return `${name}: ${why}`;
}

function depth(box) {
  let level = 1;
  for (let up = box.parent; up !== null; up = up.parent) level += 1;
  return level;
}
