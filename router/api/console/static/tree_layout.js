// Where each node of a tree is drawn: parents left of their children, one row for each leaf.

/** A bar as wide as the square root of its tokens: a long prompt does not hide short turns. */
const WIDTH_BASE = 1.2;

/**
 * `nodes`: as the API tells them, parents first. Returns boxes with x and width in shares of the
 * whole width, row and rows in lines, and the parent, children and the hit tokens of each.
 */
export function layOut(nodes, top) {
  const boxes = new Map();
  for (const node of nodes) {
    const parent = boxes.get(node.parent) ?? null;
    const x = parent === null ? 0 : parent.x + parent.width;
    const box = { node, parent, x, width: WIDTH_BASE + Math.sqrt(node.length), below: [], row: 0, rows: 1 };
    boxes.set(node.id, box);
    if (parent !== null) parent.below.push(box);
  }
  const roots = [...boxes.values()].filter((box) => box.parent === null);
  let row = 0;
  for (const box of sorted(roots)) row = place(box, row);
  const reach = Math.max(...[...boxes.values()].map(({ x, width }) => x + width), 1);
  for (const box of boxes.values()) {
    box.x /= reach;
    box.width /= reach;
  }
  return { boxes: order(sorted(roots)), rows: row, top };
}

function place(box, row) {
  box.row = row;
  let next = row;
  for (const child of sorted(box.below)) next = place(child, next);
  box.rows = Math.max(next - row, 1);
  return row + box.rows;
}

/** The most used first. */
function sorted(boxes) {
  return boxes.sort((a, b) => b.node.hits - a.node.hits || b.node.length - a.node.length
    || b.node.access - a.node.access);
}

/** As they are read: each before those right of it. */
function order(roots) {
  return roots.flatMap((box) => [box, ...order(box.below)]);
}

/** What a node is to the cache. */
export function stateOf({ locks, device, host }) {
  if (device) return locks > 0 ? "locked" : host ? "both" : "evictable";
  return host ? "host" : "empty";
}

/** The prefixes that save most: how often they were hit, times their tokens. */
export function hottest(boxes, count) {
  return [...boxes].filter(({ node }) => node.hits > 0)
    .sort((a, b) => saved(b) - saved(a)).slice(0, count);
}

export function saved({ node }) {
  return node.hits * node.length;
}
