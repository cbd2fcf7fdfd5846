"use strict";
// Rows are made of text nodes alone, so that no token can be markup.
const { words, units } = JSON.parse(document.getElementById("units").textContent);
const most = 100;
const wanted = document.getElementById("wanted");
const found = document.getElementById("found");
const told = document.getElementById("told");
const plain = words.map((word) => word.trim().toLowerCase());
const columns = { raises: [2], lowers: [3], peaks: [4] };

function search(text) {
  const name = /^\s*(\d+)(?::(\d+))?\s*$/.exec(text);
  if (name) {
    return units.filter((unit) => unit[0] === +name[1] && (name[2] === undefined || unit[1] === +name[2]));
  }
  const [, column, rest] = /^\s*(?:(raises|lowers|peaks):)?(.*)$/.exec(text);
  const token = rest.trim().toLowerCase();
  if (!token) return units;
  const where = columns[column] || [2, 3, 4];
  const rank = (unit) => {
    let best = Infinity;
    for (const i of where) {
      unit[i].forEach((word, place) => {
        if (plain[word] === token) best = Math.min(best, place);
        else if (plain[word].startsWith(token)) best = Math.min(best, place + 100);
      });
    }
    return best;
  };
  return units.map((unit) => [rank(unit), unit]).filter((pair) => pair[0] < Infinity)
    .sort((a, b) => a[0] - b[0]).map((pair) => pair[1]);
}

function show() {
  const hits = search(wanted.value);
  told.textContent = hits.length > most ? `${hits.length} neurons, the first ${most} are shown` : `${hits.length} neurons`;
  found.replaceChildren(...hits.slice(0, most).map((unit) => {
    const row = document.createElement("tr");
    const cells = [`${unit[0]}:${unit[1]}`, ...[2, 3, 4].map((i) => unit[i].map((word) => words[word]).join(" · ")), unit[5]];
    cells.forEach((text, i) => {
      const cell = document.createElement(i ? "td" : "th");
      if (i === 5) cell.className = "lrpx-num";
      const inner = document.createElement("bdi");
      inner.textContent = text;
      cell.append(inner);
      row.append(cell);
    });
    return row;
  }));
}

wanted.addEventListener("input", show);
show();
