const get = id => document.getElementById(id);
const limit = Number(get("give").dataset.limit);
let found = null, asked = 0;

function made(tag, text) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  return element;
}

function bars(list, rows) {
  list.replaceChildren(...rows.map(([name, share]) => {
    const row = made("li"), track = made("div"), bar = made("div");
    bar.style.width = 100 * share + "%";
    track.append(bar);
    row.append(made("span", name), made("b", (100 * share).toFixed(1) + " %"), track);
    return row;
  }));
}

function photos(strip, indices) {
  strip.replaceChildren(...indices.map(index => {
    const about = found.images[index], figure = made("figure"), image = made("img");
    image.src = "training-image/" + index;
    image.alt = about.class;
    image.title = about.file;
    figure.className = about.class === found.class ? "same" : "other";
    figure.append(image, made("figcaption", about.class));
    return figure;
  }));
}

function move() {
  const way = found.directions[get("direction").value], at = Number(get("strength").value);
  const place = found.positions.reduce((best, value, i) =>
    Math.abs(value - at) < Math.abs(found.positions[best] - at) ? i : best, 0);
  get("amount").textContent = found.positions[place].toFixed(1);
  const far = Math.abs(found.positions[place]) * way.length;
  get("note").textContent = `${way.note}. The feature is moved by ${far.toPrecision(2)} times the distance of the nearest training image.`;
  photos(get("along"), way.neighbours[place]);
  bars(get("along-top"), way.top[place]);
}

function say(sentence, wrong) {
  get("state").textContent = sentence;
  get("state").className = wrong ? "wrong" : "caption";
}

async function ask(file) {
  const turn = ++asked;
  found = null;
  get("found").hidden = true;
  get("top").replaceChildren();
  URL.revokeObjectURL(get("given").src);
  get("given").hidden = true;
  if (file.size > limit) return say("The file is too large.", true);
  get("given").src = URL.createObjectURL(file);
  get("given").onload = () => { get("given").hidden = false; };
  say("Looking …", false);
  let answer;
  try {
    const response = await fetch("answer", { method: "POST", body: file });
    answer = await response.json();
  } catch {
    answer = { error: "The server does not answer." };
  }
  if (turn !== asked) return;
  if (answer.error) {
    get("given").hidden = true;
    get("given").onload = null;
    return say(answer.error, true);
  }
  found = answer;
  say(file.name, false);
  bars(get("top"), found.top);
  photos(get("nearest"), found.neighbours);
  get("direction").replaceChildren(...found.directions.map((way, i) => {
    const option = made("option", way.name);
    option.value = i;
    return option;
  }));
  get("strength").value = 0;
  move();
  get("found").hidden = false;
}

get("file").addEventListener("change", event => {
  if (event.target.files.length) ask(event.target.files[0]);
  event.target.value = "";
});
for (const kind of ["dragover", "drop"]) addEventListener(kind, event => event.preventDefault());
addEventListener("dragover", () => get("drop").classList.add("over"));
for (const kind of ["dragleave", "drop"]) addEventListener(kind, () => get("drop").classList.remove("over"));
addEventListener("drop", event => { if (event.dataTransfer.files.length) ask(event.dataTransfer.files[0]); });
get("strength").addEventListener("input", move);
get("direction").addEventListener("change", move);
get("back").addEventListener("click", () => { get("strength").value = 0; move(); });
