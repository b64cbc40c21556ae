"use strict";
// What is resident by directory: a squarified treemap (Bruls, Huizing, van Wijk).

const treemap = { path: "", wanted: "", entries: [] };

// Divides a rectangle among values in descending order. Returns one rectangle for each.
function squarify(values, rectangle) {
  const total = values.reduce((sum, value) => sum + value, 0);
  const placed = [];
  let { x, y, w, h } = rectangle;
  const scale = total > 0 ? (w * h) / total : 0;
  const worst = (row, side) => {
    const sum = row.reduce((a, b) => a + b, 0);
    return Math.max((side * side * row[0]) / (sum * sum), (sum * sum) / (side * side * row[row.length - 1]));
  };
  let from = 0;
  while (from < values.length) {
    const side = Math.min(w, h);
    const row = [values[from] * scale];
    let next = from + 1;
    while (next < values.length && worst([...row, values[next] * scale], side) <= worst(row, side)) {
      row.push(values[next] * scale);
      next += 1;
    }
    const thick = side > 0 ? row.reduce((a, b) => a + b, 0) / side : 0;
    let along = 0;
    for (const area of row) {
      const long = thick > 0 ? area / thick : 0;
      placed.push(w >= h ? { x, y: y + along, w: thick, h: long } : { x: x + along, y, w: long, h: thick });
      along += long;
    }
    if (w >= h) {
      x += thick;
      w -= thick;
    } else {
      y += thick;
      h -= thick;
    }
    from = next;
  }
  return placed;
}

function below(path, name) {
  return path ? path + "/" + name : name;
}

function drawTreemap() {
  const place = document.getElementById("treemap");
  const entries = treemap.entries.filter((entry) => entry.bytes > 0);
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.name : null;
  const area = { x: 0, y: 0, w: place.clientWidth, h: place.clientHeight };
  const sorted = [...entries].sort((a, b) => b.bytes - a.bytes);
  const rectangles = squarify(sorted.map((entry) => entry.bytes), area);
  const tiles = sorted.map((entry, i) => {
    const { x, y, w, h } = rectangles[i];
    const name = entry.name === null ? countText(entry.files) + " other files" : entry.name + (entry.is_directory ? "/" : "");
    const tile = element(entry.is_directory ? "button" : "div", "tile" + (entry.name === null ? " rest" : ""));
    Object.assign(tile.style, { left: x + "px", top: y + "px", width: w + "px", height: h + "px" });
    tile.title = name + ": " + bytesText(entry.bytes) + " in " + countText(entry.files) + (entry.files === 1 ? " file" : " files");
    tile.dataset.name = entry.name === null ? "" : entry.name;
    tile.dataset.bytes = entry.bytes;
    tile.setAttribute("aria-label", tile.title);
    if (w > 46 && h > 20) {
      tile.append(element("b", "", name));
      if (h > 38) tile.append(bytesText(entry.bytes));
    } else {
      tile.classList.add("tiny");
    }
    if (entry.is_directory) {
      tile.type = "button";
      tile.addEventListener("click", () => zoom(below(treemap.path, entry.name), true));
    }
    return tile;
  });
  place.replaceChildren(...tiles);
  const again = focused && tiles.find((tile) => tile.dataset.name === focused && tile.tagName === "BUTTON");
  if (again) again.focus({ preventScroll: true });
}

function drawCrumbs() {
  const parts = treemap.path ? treemap.path.split("/") : [];
  const crumb = (text, path) => {
    const button = element("button", "", text);
    button.type = "button";
    button.addEventListener("click", () => zoom(path, true));
    return button;
  };
  const crumbs = [crumb("mount", "")];
  parts.forEach((part, i) => crumbs.push(element("span", "arrow", "/"), crumb(part, parts.slice(0, i + 1).join("/"))));
  document.getElementById("crumbs").replaceChildren(...crumbs);
}

// Shows a directory. `moves`: the reader chose it, so the focus goes to its first entry.
async function zoom(path, moves) {
  treemap.wanted = path;
  const answer = await fetch("resident?path=" + encodeURIComponent(path)).then((r) => r.json()).catch(() => null);
  const note = document.getElementById("treemap-note");
  // The reader may have chosen another directory meanwhile.
  if (!answer || treemap.wanted !== path) return;
  if (answer.error) {
    if (path) return zoom("", moves);
    note.textContent = answer.error;
    return;
  }
  treemap.path = path;
  treemap.entries = answer.directory.entries;
  note.replaceChildren(exactBytes(answer.directory.bytes), " in ", exactCount(answer.directory.files),
    " files, counted at " + new Date(answer.counted_unix * 1000).toLocaleTimeString("en-GB"));
  drawCrumbs();
  drawTreemap();
  if (moves) {
    const first = document.querySelector("#treemap button") || document.querySelector("#crumbs button:last-of-type");
    if (first) first.focus({ preventScroll: true });
  }
}

function up() {
  if (treemap.wanted) zoom(treemap.wanted.split("/").slice(0, -1).join("/"), true);
}
