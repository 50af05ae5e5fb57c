(() => {
  const root = document.currentScript.closest(".semaug-figure");
  const tip = root.querySelector(".tip"), sheet = root.querySelector("img.sheet");
  if (!tip || !sheet) return;
  const picture = tip.querySelector(".picture");
  const columns = +sheet.dataset.columns, rows = +sheet.dataset.rows;
  picture.style.backgroundImage = `url("${sheet.src}")`;
  picture.style.backgroundSize = `${100 * columns}% ${100 * rows}%`;
  const points = [...root.querySelectorAll(".point")];
  const at = (i, n) => n > 1 ? `${100 * i / (n - 1)}%` : "0%";

  function show(point) {
    hide();
    const image = point.dataset.image;
    for (const other of points) if (other.dataset.image === image) other.classList.add("on");
    picture.style.backgroundPosition = `${at(image % columns, columns)} ${at(Math.floor(image / columns), rows)}`;
    tip.querySelector("b").textContent = point.dataset.name;
    tip.querySelector("span").textContent = point.dataset.hint;
    tip.hidden = false;
    const frame = root.getBoundingClientRect(), spot = point.getBoundingClientRect();
    const room = frame.width - tip.offsetWidth;
    let left = spot.right - frame.left + 12;
    if (left > room) left = spot.left - frame.left - tip.offsetWidth - 12;
    tip.style.left = `${Math.max(0, Math.min(left, room))}px`;
    tip.style.top = `${Math.max(0, spot.top - frame.top - tip.offsetHeight / 2)}px`;
  }

  function hide() {
    tip.hidden = true;
    for (const point of points) point.classList.remove("on");
  }

  for (const panel of root.querySelectorAll(".cloud")) {
    const own = [...panel.querySelectorAll(".point")];
    own.forEach((point, i) => {
      point.addEventListener("pointerenter", () => show(point));
      point.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") hide(); });
      point.addEventListener("click", () => { point.focus(); show(point); });
      point.addEventListener("focus", () => show(point));
      point.addEventListener("blur", hide);
      point.addEventListener("keydown", event => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (event.key === "Escape") hide();
        if (!step) return;
        event.preventDefault();
        const next = own[(i + step + own.length) % own.length];
        point.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
      });
    });
  }

  const dim = name => {
    for (const panel of root.querySelectorAll(".cloud")) {
      panel.classList.toggle("dimmed", name !== null);
      for (const point of panel.querySelectorAll(".point")) point.classList.toggle("kin", point.dataset.class === name);
    }
  };
  for (const entry of root.querySelectorAll(".key li[data-class]")) {
    entry.addEventListener("pointerenter", () => dim(entry.dataset.class));
    entry.addEventListener("pointerleave", () => dim(null));
  }
})();
