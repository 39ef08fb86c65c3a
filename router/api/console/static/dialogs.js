// What opens over the page: the question for a key, and the list of keys of the keyboard.

import { keepKey } from "./api.js";
import { h } from "./dom.js";

const KEYS = [
  ["1 – 5", "the views, from left to right"],
  ["p", "pause, go on"],
  ["t", "colors: of the system, light, dark"],
  ["← → ↑ ↓", "in a tree: parent, first child, the one above and below"],
  ["Enter", "open what has the focus; in a tree: zoom in"],
  ["Backspace", "in a tree: zoom out"],
  ["?", "this list"],
];

/** Returns when a key was given; the caller then tries again. */
export function askForKey(problem, hadKey) {
  const field = h("input", {
    type: "password", id: "console-key", autocomplete: "off", required: true, spellcheck: "false",
  });
  const dialog = h("dialog", { "aria-labelledby": "key-title" },
    h("h2", { id: "key-title" }, "This console needs the operator's key"),
    h("p", { class: "note" }, hadKey ? problem
      : "A key of the tenant admin, from the file that router.security.api_keys names. "
        + "It stays in this tab and is forgotten with it."),
    h("form", { method: "dialog" },
      h("label", { for: "console-key", class: "unseen" }, "API key"),
      field,
      h("div", { class: "row" }, h("button", { class: "button primary", type: "submit" }, "Look"))));
  document.body.append(dialog);
  // Without a key there is nothing to see behind it.
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      keepKey(field.value.trim());
      dialog.remove();
      resolve();
    });
  });
}

export function showKeys() {
  if (document.querySelector("dialog[open]") !== null) return;
  const lines = KEYS.flatMap(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]);
  const dialog = h("dialog", { "aria-labelledby": "keys-title" },
    h("h2", { id: "keys-title" }, "Keys"),
    h("dl", { class: "keys" }, ...lines),
    h("form", { method: "dialog" },
      h("div", { class: "row" }, h("button", { class: "button", type: "submit" }, "Close"))));
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}
