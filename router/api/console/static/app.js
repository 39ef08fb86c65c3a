// The frame: which view is shown, how often the router is asked, keys of the keyboard.

import { Refused, ask, hasKey } from "./api.js";
import { h, fill, keyed, set, write } from "./dom.js";
import { Figures } from "./figures.js";
import { askForKey, showKeys } from "./dialogs.js";
import { HandoffView } from "./handoffs.js";
import { LoadView } from "./load.js";
import { MapView } from "./map.js";
import { RequestView } from "./requests.js";
import { Theme } from "./theme.js";
import { TreeView } from "./trees.js";

const INTERVAL_MS = 1000;
const RETRY_MS = 3000;
const HISTORY_MAX = 900;

const VIEWS = [
  ["map", "Map", MapView],
  ["trees", "Trees", TreeView],
  ["handoffs", "Handoffs", HandoffView],
  ["requests", "Requests", RequestView],
  ["load", "Load", LoadView],
];

/** What the page knows; views read it, and none of them keeps it. */
const state = { cluster: null, history: [], events: [], gone: [] };

const frame = Object.fromEntries(
  ["view", "tabs", "pulse", "pause", "theme", "help", "figures", "model"].map(
    (id) => [id, document.getElementById(id)],
  ),
);
const figures = new Figures(frame.figures);
const theme = new Theme(frame.theme);
const trouble = h("p", { class: "trouble", role: "alert", hidden: true });

let shown = null;
let paused = false;
let timer = null;
let running = false;
/** Whether somebody wanted a turn while one was under way: another view, say. */
let again = false;
let lastNumber = -1;

// --- what is shown ---

function place() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const index = VIEWS.findIndex(([id]) => id === name);
  return [Math.max(index, 0), rest.map(decodeURIComponent)];
}

function show() {
  const [index, path] = place();
  const [name, title, View] = VIEWS[index];
  if (shown?.name !== name) {
    shown?.view.leave?.();
    const view = new View({ ask, go, refresh: () => schedule(0) });
    shown = { name, view };
    fill(frame.view, trouble, view.element);
    document.title = `${title} · kvferry`;
  }
  shown.view.open?.(path);
  keyed(frame.tabs, VIEWS, ([id]) => id, ([id, text]) => h("a", { href: `#/${id}` }, text),
    (tab, [id]) => set(tab, "aria-current", id === name ? "page" : null));
  if (state.cluster !== null) shown.view.update(state);
  schedule(0);
}

function go(...path) {
  location.hash = `#/${path.map(encodeURIComponent).join("/")}`;
}

// --- what is asked ---

function schedule(delay) {
  clearTimeout(timer);
  timer = null;
  // Nobody looks: nothing is asked, and the router has no cost of this page.
  if (!paused && !document.hidden) timer = setTimeout(turn, delay);
}

async function turn() {
  again = running;
  if (running) return;
  running = true;
  let delay = INTERVAL_MS;
  try {
    await update();
    tell("live", "live");
  } catch (error) {
    delay = await failed(error);
  } finally {
    running = false;
  }
  schedule(again ? 0 : delay);
}

async function update() {
  const answer = await ask("cluster", { since: lastNumber });
  take(answer);
  const view = shown.view;
  await view.poll?.(state);
  trouble.hidden = true;
  write(frame.model, state.cluster.model);
  figures.update(state);
  if (view === shown.view) view.update(state);
}

function take(answer) {
  const { history, events, gone } = answer;
  // A router that was started anew counts from the beginning, one that was left alone goes on.
  if (history.first !== lastNumber + 1) state.history = [];
  const points = history.points.map((values) =>
    Object.fromEntries(history.fields.map((field, index) => [field, values[index]])));
  state.history = [...state.history, ...points].slice(-HISTORY_MAX);
  lastNumber = history.first + history.points.length - 1;
  Object.assign(state, { cluster: answer, events, gone });
}

/** Tell it, and return when to try again, in milliseconds. */
async function failed(error) {
  if (error instanceof Refused && error.needsKey) {
    tell("lost", "needs a key");
    await askForKey(error.message, hasKey());
    return 0;
  }
  const why = error instanceof Refused ? error.message : "the router does not answer";
  tell("lost", error instanceof Refused ? "refused" : "no answer");
  write(trouble, `${why}; what is shown may be old. Trying again every ${RETRY_MS / 1000} s.`);
  trouble.hidden = false;
  return RETRY_MS;
}

function tell(kind, text) {
  frame.pulse.dataset.state = kind;
  write(frame.pulse, text);
}

// --- who looks ---

function pause() {
  paused = !paused;
  set(frame.pause, "aria-pressed", String(paused));
  write(frame.pause, paused ? "Go on" : "Pause");
  if (paused) tell("paused", "paused");
  schedule(0);
}

function pressed(event) {
  const typing = event.target.closest("input, select, textarea, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const number = Number(event.key);
  if (number >= 1 && number <= VIEWS.length) go(VIEWS[number - 1][0]);
  else if (event.key === "p") pause();
  else if (event.key === "t") theme.next();
  else if (event.key === "?") showKeys();
  else return;
  event.preventDefault();
}

frame.pause.addEventListener("click", pause);
frame.help.addEventListener("click", showKeys);
addEventListener("hashchange", () => {
  show();
  frame.view.focus({ preventScroll: true });
});
addEventListener("keydown", pressed);
document.addEventListener("visibilitychange", () => schedule(0));
show();
