// Calls of the console's API. The key lives in this tab: not in the address, not on a disk.

const KEY = "kvferry-console-key";
const TIMEOUT_MS = 15000;

/** An answer that is no success, in the router's words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  /** Whether another key may help. */
  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** GET `api/<path>`. `params` that are null or undefined are left out. Throws `Refused`. */
export async function ask(path, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  const key = sessionStorage.getItem(KEY);
  const response = await fetch(`api/${path}${query ? `?${query}` : ""}`, {
    headers: key === null ? {} : { Authorization: `Bearer ${key}` },
    signal: AbortSignal.timeout(TIMEOUT_MS),
    cache: "no-store",
    credentials: "same-origin",
  });
  if (response.ok) return response.json();
  throw new Refused(response.status, await reason(response));
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the router answered ${response.status}`;
  }
}
