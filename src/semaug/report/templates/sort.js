for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const rising = head.getAttribute("aria-sort") === "descending";
    const value = row => row.cells[head.cellIndex].dataset.value;
    const order = (a, b) => {
      const x = value(a), y = value(b);
      if (x === "" || y === "") return (x === "") - (y === "");
      const way = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return rising ? way : -way;
    };
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    body.append(...[...body.rows].sort(order));
  });
}
