"use strict";
// Draws each update of the daemon. Everything is drawn as text, never as markup: paths may contain anything.

const HISTORY = 600;
const byId = (id) => document.getElementById(id);
const view = { paused: false, last: null, dirty: [], jobs: [], charts: [], previous: null };
const series = { at: [], cache: [], fast: [], pool: [], fetched: [], flushed: [], hits: [] };

// Traffic since the previous update, by source. Counts of a job that is new since then count from zero.
function traffic(update, previous) {
  const seconds = Math.max(0.001, (update.at_ms - previous.at_ms) / 1000);
  const observed = update.status.observer.kind === "ebpf" && update.sample && previous.sample;
  const counters = update.status.counters;
  const before = previous.status.counters;
  const rate = (now, then) => Math.max(0, now - then) / seconds;
  const rates = {
    seconds,
    fetched: rate(counters.pool_read_bytes, before.pool_read_bytes),
    flushed: rate(counters.pool_written_bytes, before.pool_written_bytes),
  };
  if (observed) {
    const sum = { cache_bytes: 0, fast_bytes: 0, pool_bytes: 0 };
    const then = new Map(previous.sample.jobs.map((job) => [job.id, job.traffic]));
    const add = (now, old) => {
      for (const key of Object.keys(sum)) sum[key] += Math.max(0, now[key] - (old ? old[key] : 0));
    };
    for (const job of update.sample.jobs) add(job.traffic, then.get(job.id));
    add(update.sample.others, previous.sample.others);
    rates.cache = sum.cache_bytes / seconds;
    rates.fast = sum.fast_bytes / seconds;
    rates.pool = sum.pool_bytes / seconds;
  } else {
    rates.cache = null;
    rates.fast = rate(counters.reads.fast.bytes, before.reads.fast.bytes);
    rates.pool = rate(counters.reads.fetched.bytes + counters.reads.direct.bytes,
      before.reads.fetched.bytes + before.reads.direct.bytes);
  }
  const read = (rates.cache || 0) + rates.fast + rates.pool;
  rates.read = read;
  rates.hits = read > 0 ? ((rates.cache || 0) + rates.fast) / read : null;
  return rates;
}

function remember(update, rates) {
  series.at.push(update.at_ms / 1000);
  for (const key of ["cache", "fast", "pool", "fetched", "flushed"]) series[key].push(rates[key]);
  series.hits.push(rates.hits === null ? null : rates.hits * 100);
  if (series.at.length > HISTORY) for (const key of Object.keys(series)) series[key].shift();
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// Powers of two: round numbers of bytes.
const BYTE_STEPS = Array.from({ length: 50 }, (_, i) => 2 ** i);

function chart(place, height, lines, values, axis, range, steps) {
  const stroke = colour("soft");
  const grid = { stroke: colour("line"), width: 1 };
  const options = {
    width: Math.max(200, place.clientWidth),
    height,
    cursor: { drag: { x: false, y: false } },
    legend: { markers: { width: 2, dash: (_, i) => (i > 0 && lines[i - 1][2] ? "dashed" : "solid") } },
    scales: { y: { range } },
    axes: [
      { stroke, grid, ticks: grid, values: (_, at) => at.map((t) => new Date(t * 1000).toLocaleTimeString("en-GB")), space: 90 },
      { stroke, grid, ticks: grid, size: 84, values: (_, ticks) => ticks.map(axis), ...(steps ? { incrs: steps } : {}) },
    ],
    series: [
      { label: "Time", value: (_, t) => (t ? new Date(t * 1000).toLocaleTimeString("en-GB") : "–") },
      ...lines.map(([label, hue, dash]) => ({
        label, stroke: colour(hue), width: 2, dash, points: { show: false },
        value: (_, v) => (v === null || v === undefined ? "–" : axis(v)),
      })),
    ],
  };
  place.replaceChildren();
  return new uPlot(options, values(), place);
}

function drawCharts() {
  view.charts.forEach(({ plot }) => plot.destroy());
  const throughput = () => [series.at, series.cache, series.fast, series.pool, series.fetched, series.flushed];
  const hits = () => [series.at, series.hits];
  const upTo = (_, low, high) => [0, high > 0 ? high * 1.1 : 1024];
  view.charts = [
    { values: throughput, plot: chart(byId("throughput"), 240, [
      ["Read from page cache", "sky"], ["Read from fast pool", "green", [8, 3]], ["Read from pool", "red", [2, 3]],
      ["Fetched", "purple", [12, 4, 2, 4]], ["Flushed", "orange", [5, 5]],
    ], throughput, rateText, upTo, BYTE_STEPS) },
    { values: hits, plot: chart(byId("hits"), 200, [["Hit ratio", "blue"]], hits, (v) => v.toFixed(0) + " %", [0, 100]) },
  ];
}

function tile(label, value, more, warns) {
  const made = element("li", warns ? "warn" : "");
  made.append(element("div", "label", label));
  const shown = element("div", "value");
  shown.append(...[].concat(value));
  const below = element("div", "more");
  below.append(...[].concat(more || ""));
  made.append(shown, below);
  return made;
}

function drawTiles(update, rates) {
  const status = update.status;
  const counters = status.counters;
  const reads = counters.reads;
  const daemon = reads.fast.bytes + reads.fetched.bytes + reads.direct.bytes;
  const recent = series.hits.slice(-60).filter((share) => share !== null);
  const minute = recent.length ? recent.reduce((a, b) => a + b, 0) / recent.length / 100 : null;
  const failing = update.failing_files > 0;
  const named = (id, node) => {
    node.id = id;
    return node;
  };
  const age = status.oldest_dirty_secs;
  byId("tiles").replaceChildren(
    tile("Hit ratio, last minute", percentText(minute),
      "through the daemon, since start: " + percentText(daemon ? reads.fast.bytes / daemon : null)),
    tile("Reads", rates ? rateText(rates.read) : "…", [exactCount(update.requests_waiting), " requests wait"]),
    tile("Fast pool", named("used-bytes", exactBytes(status.used_bytes)), ["of ", named("limit-bytes", exactBytes(status.limit_bytes))],
      status.used_bytes + status.reserved_bytes >= status.limit_bytes),
    tile("Dirty", named("dirty-bytes", exactBytes(status.dirty_bytes)),
      [named("dirty-files", exactCount(status.dirty_files)), " files" + (age === null ? "" : ", oldest " + secondsText(age)),
        failing ? fault(", " + update.failing_files + " fail") : ""], failing),
    tile("Leased", named("leased-bytes", exactBytes(status.leased_bytes)), [exactCount(update.leased_files), " files"]),
    tile("From the pool", named("pool-read-bytes", exactBytes(counters.pool_read_bytes)), [exactCount(update.pool_in_flight), " calls wait"]),
    tile("To the pool", named("pool-written-bytes", exactBytes(counters.pool_written_bytes)),
      [exactCount(counters.flushed_files), " files"]),
    tile("Open files", exactCount(status.open_files), [exactCount(status.resident_files), " may be evicted"]),
  );
}

function bar(parts, total) {
  const made = element("div", "bar");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", parts.map(([name, , value]) => name + " " + bytesText(value)).join(", "));
  for (const [, className, value] of parts) {
    const part = element("i", className);
    part.style.width = (total > 0 ? Math.min(100, (value / total) * 100) : 0) + "%";
    made.append(part);
  }
  return made;
}

function drawStates(status) {
  const dirty = Math.min(status.dirty_bytes, status.used_bytes);
  const leased = Math.min(status.leased_bytes, status.used_bytes - dirty);
  const clean = status.used_bytes - dirty - leased;
  const free = Math.max(0, status.limit_bytes - status.used_bytes - status.reserved_bytes);
  const parts = [["Dirty", "dirty", dirty], ["Leased", "leased", leased], ["Clean", "clean", clean],
    ["Reserved", "reserved", status.reserved_bytes], ["Free", "free", free]];
  const key = element("ul", "key");
  for (const [name, className, value] of parts) {
    const line = element("li");
    line.append(element("i", className), name + " ", exactBytes(value));
    key.append(line);
  }
  const nodes = [bar(parts, status.limit_bytes), key];
  for (const tier of status.tiers) {
    const label = element("p", "note", "Tier " + tier.name + (tier.is_volatile ? " (empty after a reboot)" : "") + ": ");
    label.append(exactBytes(tier.used_bytes), " of ", exactBytes(tier.limit_bytes));
    nodes.push(label, bar([["Used", "clean", tier.used_bytes]], tier.limit_bytes));
  }
  byId("states").replaceChildren(...nodes);
}

function badge(id, text, good) {
  const place = byId(id);
  place.textContent = text;
  place.title = text;
  place.classList.toggle("good", good === true);
  place.classList.toggle("bad", good === false);
}

function drawHead(status) {
  byId("mountpoint").textContent = status.mountpoint || "";
  byId("pool").textContent = status.pool;
  byId("version").textContent = status.version;
  byId("pid").textContent = status.pid;
  document.title = "Forebay " + (status.mountpoint || "");
  badge("pool-state", "pool " + status.pool_state + (status.pool_failure ? ": " + status.pool_failure : ""),
    status.pool_state === "up");
  badge("passthrough", status.passthrough ? "passthrough" : "no passthrough: " + status.no_passthrough, status.passthrough ? true : undefined);
  const observer = status.observer;
  const seen = observer.kind === "ebpf";
  const dropped = observer.dropped_uses + observer.dropped_paths + observer.dropped_processes;
  badge("observer", seen ? "observer: eBPF" + (dropped ? ", " + countText(dropped) + " dropped" : "") : "observer: requests only",
    dropped ? false : seen ? true : undefined);
  byId("traffic-note").textContent = seen
    ? "Bytes that programs read, by where they came from, and what moves between the pools"
    : "Only reads through the daemon are seen: " + (observer.why || "there is no observer");
}

function draw(update) {
  const began = performance.now();
  const rates = view.previous && view.previous.status.pid === update.status.pid ? traffic(update, view.previous) : null;
  view.previous = update;
  if (update.dirty) view.dirty = update.dirty;
  if (update.jobs) view.jobs = update.jobs;
  if (rates) remember(update, rates);
  const atUnix = update.at_ms / 1000;
  drawHead(update.status);
  drawTiles(update, rates);
  drawStates(update.status);
  drawDevices(update.status);
  drawDirty(view.dirty, update.status, atUnix);
  drawJobs(view.jobs, atUnix);
  drawSlow(update.slow);
  drawLatencies(update);
  drawPeers(update.peers);
  for (const { plot, values } of view.charts) {
    plot.setData(values());
    // The legend shows the last values unless the pointer chooses others.
    if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: series.at.length - 1 });
  }
  const root = document.documentElement.dataset;
  root.updates = Number(root.updates || 0) + 1;
  root.updateMs = (performance.now() - began).toFixed(1);
}

function applyTheme() {
  const theme = document.documentElement.dataset.theme || "system";
  const dark = theme === "dark" || (theme === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.toggleAttribute("data-dark", dark);
  byId("theme").textContent = "Theme: " + theme;
  drawCharts();
}

function nextTheme() {
  const root = document.documentElement.dataset;
  const next = { system: "dark", dark: "light", light: "system" }[root.theme || "system"];
  root.theme = next;
  try {
    localStorage.setItem("forebay-theme", next);
  } catch (_) {
    // A browser may forbid it: then the choice holds until the page is closed.
  }
  applyTheme();
}

function pause() {
  view.paused = !view.paused;
  byId("pause").textContent = view.paused ? "Go on" : "Pause";
  badge("live", view.paused ? "paused" : "live", view.paused ? undefined : true);
  if (!view.paused && view.last) draw(view.last);
}

function help() {
  const keys = byId("keys");
  keys.hidden = !keys.hidden;
  byId("help").setAttribute("aria-expanded", String(!keys.hidden));
}

function listen() {
  const events = new EventSource("events");
  events.onopen = () => badge("live", view.paused ? "paused" : "live", view.paused ? undefined : true);
  events.onerror = () => badge("live", "no answer, tried again", false);
  events.onmessage = (event) => {
    view.last = JSON.parse(event.data);
    // What comes once in a while is kept also while the page is paused.
    if (view.paused) {
      if (view.last.dirty) view.dirty = view.last.dirty;
      if (view.last.jobs) view.jobs = view.last.jobs;
    } else {
      draw(view.last);
    }
  };
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "p") pause();
  else if (event.key === "t") nextTheme();
  else if (event.key === "?") help();
  else if (event.key === "Backspace") up();
  else if (event.key >= "1" && event.key <= "9") {
    const section = byId("s" + event.key);
    section.focus({ preventScroll: true });
    section.scrollIntoView();
  } else return;
  event.preventDefault();
}

try {
  const saved = localStorage.getItem("forebay-theme");
  if (saved) document.documentElement.dataset.theme = saved;
} catch (_) {
  // As above.
}
byId("pause").addEventListener("click", pause);
byId("theme").addEventListener("click", nextTheme);
byId("help").addEventListener("click", help);
document.addEventListener("keydown", onKey);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
let resizing = null;
window.addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => {
    drawCharts();
    drawTreemap();
  }, 150);
});
applyTheme();
listen();
zoom("", false);
setInterval(() => {
  if (!view.paused && document.visibilityState === "visible") zoom(treemap.wanted, false);
}, 10000);
