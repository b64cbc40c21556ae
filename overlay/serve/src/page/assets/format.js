"use strict";
// Numbers as people read them. The exact value is in the `value` of a <data> element.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function bytesText(count) {
  let unit = 0;
  let value = Number(count);
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return (unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)) + " " + UNITS[unit];
}

function rateText(perSecond) {
  return bytesText(perSecond) + "/s";
}

function countText(count) {
  return Number(count).toLocaleString("en");
}

function secondsText(seconds) {
  const whole = Math.floor(seconds);
  if (seconds < 10) return (Math.round(seconds * 10) / 10) + " s";
  if (whole < 120) return whole + " s";
  if (whole < 7200) return Math.floor(whole / 60) + " min";
  if (whole < 172800) return Math.floor(whole / 3600) + " h";
  return Math.floor(whole / 86400) + " d";
}

function microsText(us) {
  if (us < 1000) return us.toFixed(0) + " µs";
  if (us < 1e6) return (us / 1000).toFixed(us < 1e4 ? 1 : 0) + " ms";
  return (us / 1e6).toFixed(1) + " s";
}

function percentText(share) {
  return share === null || !isFinite(share) ? "–" : (share * 100).toFixed(1) + "\u00a0%";
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined && text !== null) made.textContent = text;
  return made;
}

// A number with its exact value.
function exact(value, text) {
  const made = element("data", "", text);
  made.value = String(value);
  made.title = countText(value);
  return made;
}

const exactBytes = (count) => exact(count, bytesText(count));
const exactCount = (count) => exact(count, countText(count));

// The upper bounds of the buckets of a latency in microseconds, as the daemon counts them.
const BOUNDS_US = [10, 25, 100, 250, 1e3, 2.5e3, 1e4, 2.5e4, 1e5, 2.5e5, 1e6, 2.5e6, 1e7, 6e7];

function latencyCount(latency) {
  return latency.buckets.reduce((sum, bucket) => sum + bucket, 0);
}

// The bound below which a share of all latencies is.
function quantileText(latency, share) {
  const wanted = latencyCount(latency) * share;
  let below = 0;
  for (let i = 0; i < latency.buckets.length; i += 1) {
    below += latency.buckets[i];
    if (below >= wanted) {
      return i < BOUNDS_US.length ? "≤ " + microsText(BOUNDS_US[i]) : "> " + microsText(BOUNDS_US[BOUNDS_US.length - 1]);
    }
  }
  return "–";
}
