"use strict";
// The tables. A table is drawn again only if its data changed.

const drawn = new Map();

// `columns`: [title, class of the cells, value of a row]. A value is a text, a node, or null.
function drawTable(id, columns, rows, none) {
  const signature = JSON.stringify(rows);
  if (drawn.get(id) === signature) return;
  drawn.set(id, signature);
  const table = document.getElementById(id);
  if (rows.length === 0) {
    const cell = element("td", "none", none);
    const row = element("tr");
    row.append(cell);
    table.replaceChildren(row);
    return;
  }
  const head = element("tr");
  for (const [title, className] of columns) {
    const cell = element("th", className === "right" ? "right" : "", title);
    cell.scope = "col";
    head.append(cell);
  }
  const lines = rows.map((row) => {
    const line = element("tr");
    for (const [, className, value] of columns) {
      const cell = element("td", className);
      const shown = value(row);
      if (shown !== null && shown !== undefined) cell.append(shown);
      line.append(cell);
    }
    return line;
  });
  const top = element("thead");
  top.append(head);
  const body = element("tbody");
  body.append(...lines);
  table.replaceChildren(top, body);
}

function fault(text) {
  return text ? element("span", "fault", text) : null;
}

function deviceState(device) {
  let why = device.failure;
  if (device.state === "suspect" && device.holds_catalog) {
    why = "it holds the catalog, so it cannot be bypassed";
  } else if (device.state === "bypassed" && device.probe_worked) {
    why = "a probe worked";
  }
  return why ? device.state + ": " + why : device.state;
}

function drawDevices(status) {
  drawTable("devices", [
    ["Directory", "path", (d) => d.path],
    ["Tier", "", (d) => d.tier],
    ["State", "", (d) => (d.state === "healthy" ? "✓ healthy" : fault("▲ " + deviceState(d)))],
    ["Size", "right", (d) => exactBytes(d.total_bytes)],
    ["Free", "right", (d) => exactBytes(d.free_bytes)],
    ["Errors", "right", (d) => (d.errors ? fault(countText(d.errors)) : "0")],
  ], status.fast, "There is no device.");
}

function drawDirty(files, status, atUnix) {
  const more = status.dirty_files - files.length;
  document.getElementById("dirty-note").textContent =
    more > 0 ? "The oldest " + files.length + " of " + countText(status.dirty_files) : "Oldest first";
  const rows = files.map((f) => ({ ...f, age: secondsText(Math.max(0, atUnix - f.since_unix)) }));
  drawTable("dirty", [
    ["Path", "path", (f) => f.path],
    ["Differs", "", (f) => f.what],
    ["Size", "right", (f) => exactBytes(f.bytes)],
    ["Age", "right", (f) => f.age],
    ["Flushed by", "text", (f) => f.why],
    ["Last error", "text", (f) => fault(f.error)],
  ], rows, "The pool has everything.");
}

function drawSlow(calls) {
  drawTable("slow", [
    ["Call", "", (c) => c.kind],
    ["Object", "path", (c) => c.path || "/"],
    ["Took", "right", (c) => microsText(c.took_ms * 1000)],
    ["At", "", (c) => new Date(c.answered_unix * 1000).toLocaleTimeString("en-GB")],
    ["Error", "text", (c) => fault(c.error)],
  ], [...calls].reverse(), "None.");
}

function drawLatencies(update) {
  const mean = (row) => microsText(row.latency.sum_us / Math.max(1, latencyCount(row.latency)));
  drawTable("calls", [
    ["Call", "", (c) => c.call],
    ["Answers", "right", (c) => exactCount(c.count)],
    ["Failed", "right", (c) => (c.failed + c.abandoned ? fault(countText(c.failed + c.abandoned)) : "0")],
    ["Mean", "right", mean],
    ["Half", "right", (c) => quantileText(c.latency, 0.5)],
    ["99 %", "right", (c) => quantileText(c.latency, 0.99)],
  ], update.pool, "None yet.");
  drawTable("requests", [
    ["Request", "", (r) => r.operation],
    ["Answers", "right", (r) => exactCount(latencyCount(r.latency))],
    ["Mean", "right", mean],
    ["Half", "right", (r) => quantileText(r.latency, 0.5)],
    ["99 %", "right", (r) => quantileText(r.latency, 0.99)],
  ], update.requests, "None yet.");
}

const reasonsText = (reasons) => reasons.map(([why, count]) => why + " " + countText(count)).join(", ");

function drawPeers(peers) {
  document.getElementById("s9").hidden = !peers;
  if (!peers) return;
  const note = ["This node is " + peers.node + ", answers at " + peers.listen + ", placement " + peers.placement,
    ". From other nodes: ", exactBytes(peers.read_bytes), ", to other nodes: ", exactBytes(peers.given_bytes), ". "];
  if (peers.passed_over.length > 0) note.push("Passed over: " + reasonsText(peers.passed_over) + ".");
  document.getElementById("peers-note").replaceChildren(...note);
  drawTable("peers", [
    ["Member", "path", (m) => m.node],
    ["Address", "", (m) => m.address],
    ["State", "", (m) => (m.state === "suspected" ? fault("▲ suspected") : m.state === "this" ? "this node" : "✓ trusted")],
    ["Known by", "", (m) => m.sources.join(", ")],
    ["Share", "right", (m) => percentText(m.share)],
    ["Read from it", "right", (m) => exactBytes(m.read_bytes)],
    ["Given to it", "right", (m) => exactBytes(m.given_bytes)],
    ["Passed over", "text", (m) => fault(reasonsText(m.passed_over))],
    ["", "text", (m) => (m.sees_other_members ? fault("has another list of members") : null)],
  ], peers.members, "There is no other member.");
}

function foreseen(job) {
  const ahead = job.ahead;
  if (!ahead) return null;
  const used = ahead.bytes ? ", used " + percentText(ahead.used_bytes / ahead.bytes) : "";
  return countText(ahead.files) + " files, " + bytesText(ahead.bytes) + used;
}

function drawJobs(jobs, atUnix) {
  const rows = [...jobs].reverse().map((job) => ({
    ...job,
    time: secondsText(Math.max(0, (job.ended_unix || atUnix) - job.begun_unix)),
  }));
  drawTable("jobs", [
    ["Job", "path", (j) => j.id],
    ["", "short", (j) => (j.ended_unix ? "ended" : "▶ runs")],
    ["Time", "right", (j) => j.time],
    ["Command", "path", (j) => j.command],
    ["Read", "right", (j) => exactBytes(j.bytes)],
    ["Page cache", "right", (j) => exactBytes(j.cache_bytes)],
    ["Fast pool", "right", (j) => exactBytes(j.fast_bytes)],
    ["Pool", "right", (j) => exactBytes(j.pool_bytes)],
    ["Written", "right", (j) => exactBytes(j.written_bytes)],
    ["Fetched ahead", "text", foreseen],
    ["", "", (j) => {
      const button = element("button", "", countText(j.file_count) + (j.file_count === 1 ? " file" : " files"));
      button.type = "button";
      button.addEventListener("click", () => openJob(j.id));
      return button;
    }],
  ], rows, "No job has run.");
}

async function openJob(id) {
  const place = document.getElementById("job");
  place.hidden = false;
  const answer = await fetch("job?id=" + encodeURIComponent(id)).then((r) => r.json()).catch((e) => ({ error: String(e) }));
  const heading = element("h3", "", answer.error ? "Job " + id + ": " + answer.error : "Files of job " + id);
  const table = element("table");
  table.id = "job-files";
  const scroll = element("div", "scroll");
  scroll.append(table);
  place.replaceChildren(heading, scroll);
  drawn.delete("job-files");
  drawTable("job-files", [
    ["First use", "right", (f) => f.first_use_rank],
    ["Path", "path", (f) => f.path],
    ["Opens", "right", (f) => exactCount(f.opens)],
    ["Read", "right", (f) => exactBytes(f.bytes)],
    ["Page cache", "right", (f) => exactBytes(f.cache_bytes)],
    ["Fast pool", "right", (f) => exactBytes(f.fast_bytes)],
    ["Pool", "right", (f) => exactBytes(f.pool_bytes)],
    ["Written", "right", (f) => exactBytes(f.written_bytes)],
  ], answer.files || [], "It used no file.");
}
