for (const head of document.querySelectorAll("table.sortable thead th")) {
  const sort = () => {
    const table = head.closest("table"), body = table.tBodies[0], at = head.cellIndex;
    const down = head.getAttribute("aria-sort") !== "descending";
    const key = row => { const v = row.cells[at].dataset.v; return v === undefined ? row.cells[at].textContent : +v; };
    const order = (a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (down ? -1 : 1);
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...[...body.rows].sort(order));
  };
  head.tabIndex = 0;
  head.addEventListener("click", sort);
  head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
}
