// The accounts of KV slots: their order, their names, and the bar that shows them.

import { h, set, vars } from "./dom.js";
import { count, percent } from "./format.js";

/** From what is in use to what is free. `what` is for people who see the word the first time. */
export const ACCOUNTS = [
  ["private", "private", "owned by one request"],
  ["inbound", "inbound", "owned by a handoff that is arriving"],
  ["loading", "loading", "on its way back from a lower tier"],
  ["protected", "protected", "cached, and locked by a request"],
  ["evictable", "evictable", "cached, nobody reads it"],
  ["free", "free", "nobody's"],
];

export const HOST_ACCOUNTS = [
  ["protected", "protected", "in use by a copy"],
  ["private", "writing", "a copy from the device is under way"],
  ["loading", "loading", "pages from files are under way"],
  ["evictable", "evictable", "cached, nobody reads it"],
  ["free", "free", "nobody's"],
];

/** An empty bar of `list`; `paint` fills it. The width of a part is its share of the slots. */
export function bar(list = ACCOUNTS) {
  const parts = list.map(([color, field]) => h("i", { class: `part ${color}`, "data-field": field }));
  return h("div", { class: "accounts", role: "img" }, ...parts);
}

export function paint(element, accounts) {
  const total = accounts?.total ?? 0;
  const told = [];
  for (const part of element.children) {
    const field = part.dataset.field;
    const slots = accounts?.[field] ?? 0;
    vars(part, { "--share": total ? slots / total : 0 });
    if (slots) told.push(`${field} ${count(slots)} (${percent(slots / total)})`);
  }
  const text = total ? `${told.join(", ")} of ${count(total)} slots` : "no slots known";
  set(element, "aria-label", text);
  set(element, "title", text);
}

/** What each color means. */
export function legend(list = ACCOUNTS) {
  return h("ul", { class: "legend", "aria-label": "Accounts of KV slots" },
    ...list.map(([color, name, what]) => h("li", { title: what },
      h("i", { class: `dot ${color}` }), h("b", {}, name), h("span", {}, ` ${what}`))));
}

/** Slots that nobody else could have now. */
export function held(accounts) {
  return accounts === null ? 0 : accounts.total - accounts.free - accounts.evictable;
}
