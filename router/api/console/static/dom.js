// Elements without markup: text is always text, whatever a client has put into it.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. `props`: attributes; `on`: {event: handler}; `vars`: {"--name": value}. */
export function h(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

/** An SVG element; as `h`. */
export function s(tag, props = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

function filled(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    } else if (name === "vars") {
      vars(element, value);
    } else {
      set(element, name, value);
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set an attribute if it differs; null, undefined and false take it away. */
export function set(element, name, value) {
  if (value === null || value === undefined || value === false) {
    element.removeAttribute(name);
  } else {
    const text = value === true ? "" : String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

/** Set properties of the style; unlike the attribute, the page's policy allows these. */
export function vars(element, values) {
  for (const [name, value] of Object.entries(values)) element.style.setProperty(name, value);
}

/** Set the text if it differs, so that what a reader has selected stays selected. */
export function write(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/**
 * Make the children of `parent` those of `items`, in order, keeping the elements of items that
 * were there before: focus, selection and scrolling survive an update.
 * `make(item)` returns an element, `update(element, item)` fills it.
 */
export function keyed(parent, items, keyOf, make, update) {
  const known = parent.keyedChildren ?? new Map();
  const now = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (now.has(key)) continue;
    const element = known.get(key) ?? make(item);
    now.set(key, element);
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  for (const [key, element] of known) if (!now.has(key)) element.remove();
  parent.keyedChildren = now;
}

/** Fill `parent` with these and nothing else. */
export function fill(parent, ...children) {
  parent.replaceChildren(...children);
  parent.keyedChildren = undefined;
}
