"use strict";
const text = document.getElementById("text"), pieces = text.children;
const bytes = (node) => Uint8Array.from(atob(node.dataset.values), (c) => c.charCodeAt(0));
const number = (node, name) => Number(node.dataset[name]);
const [pieceTokens, columnTokens, total] = ["tokens", "column", "total"].map((name) => number(text, name));
const share = (value) => `${((100 * value) / number(text, "steps")).toFixed(value % 2 ? 1 : 0)} %`;
const range = (first, last) => (last > first ? `s ${first.toLocaleString("en")}–${last.toLocaleString("en")}` : ` ${first.toLocaleString("en")}`);
let marked = [];

function mark(first, last) {
  for (const piece of marked) piece.classList.remove("on");
  marked = Array.from(pieces).slice(Math.floor(first / pieceTokens), Math.floor(last / pieceTokens) + 1);
  for (const piece of marked) piece.classList.add("on");
  return marked.map((piece) => piece.textContent).join("");
}

for (const map of document.querySelectorAll(".map[data-values]")) {
  const [cells, cursor, said] = [map.querySelector(".cells"), map.querySelector(".cursor"), map.querySelector("output")];
  const [rows, columns] = ["rows", "columns"].map((name) => number(map, name));
  const values = bytes(map), names = JSON.parse(map.dataset.names);
  let row = 0, column = 0;

  function show() {
    row = Math.min(Math.max(row, 0), rows - 1);
    column = Math.min(Math.max(column, 0), columns - 1);
    const first = column * columnTokens, last = Math.min(first + columnTokens, total) - 1;
    const words = mark(first, last).slice(0, 120);
    said.textContent = `${names[row]}, prompt token${range(first + 1, last + 1)}: read by ${share(values[row * columns + column])} “${words}”`;
    cursor.hidden = false;
    Object.assign(cursor.style, {
      left: `${(100 * column) / columns}%`, top: `${(100 * row) / rows}%`,
      width: `${100 / columns}%`, height: `${100 / rows}%`,
    });
  }

  function scroll() {
    if (marked.length) text.scrollTop = marked[0].offsetTop - text.clientHeight / 3;
  }

  cells.addEventListener("pointermove", (event) => {
    const box = cells.getBoundingClientRect();
    column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    show();
  });
  cells.addEventListener("click", scroll);
  cells.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    row += move[0];
    column += move[1];
    show();
    scroll();
  });
}

const pieceValues = bytes(text), saidOfText = document.getElementById("read-text");
text.addEventListener("pointerover", (event) => {
  const index = Array.prototype.indexOf.call(pieces, event.target);
  if (index < 0) return;
  const first = index * pieceTokens, last = Math.min(first + pieceTokens, total);
  saidOfText.textContent = `Prompt token${range(first + 1, last)}: read by ${share(pieceValues[index])} of all (layer, kv head, step)s.`;
});
