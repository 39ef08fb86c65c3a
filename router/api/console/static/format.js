// Numbers as people read them. What is not known is a dash.

export const NONE = "–";

/** 1234567 -> "1.23 M". */
export function count(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 10000) return String(Math.round(value));
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= size) return `${short(value / size)} ${unit}`;
  }
  return String(value);
}

/** Bytes in powers of 1024. */
export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size) return `${short(value / size)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

/** Seconds: "3.2 ms", "1.24 s", "4 min", "2 h". */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.9995) return `${short(value * 1000)} ms`;
  if (value < 90) return `${short(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return `${short(value / 3600)} h`;
}

/** How long ago, coarsely: it is read, not measured. */
export function ago(value) {
  if (value < 1.5) return "just now";
  return value < 90 ? `${Math.round(value)} s ago` : `${seconds(value)} ago`;
}

/** A share of 0 to 1. */
export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return NONE;
  const value = 100 * share;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} %`;
}

/** Three digits that matter. */
export function short(value) {
  if (value >= 100 || value === 0) return String(Math.round(value));
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** "1 worker", "2 workers". */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
