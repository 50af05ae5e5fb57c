const get = id => document.getElementById(id);
const limit = Number(get("upload").dataset.limit);
let result = null, requests = 0;

function create(tag, text) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  return element;
}

function bars(list, rows) {
  list.replaceChildren(...rows.map(([name, share]) => {
    const row = create("li"), track = create("div"), bar = create("div");
    bar.style.width = 100 * share + "%";
    track.append(bar);
    row.append(create("span", name), create("b", (100 * share).toFixed(1) + " %"), track);
    return row;
  }));
}

function photos(strip, indices) {
  strip.replaceChildren(...indices.map(index => {
    const about = result.images[index], figure = create("figure"), image = create("img");
    image.src = "training-image/" + index;
    image.alt = about.class;
    image.title = about.file;
    figure.className = about.class === result.class ? "same" : "other";
    figure.append(image, create("figcaption", about.class));
    return figure;
  }));
}

function move() {
  const direction = result.directions[get("direction").value], at = Number(get("strength").value);
  const place = result.positions.reduce((best, value, i) =>
    Math.abs(value - at) < Math.abs(result.positions[best] - at) ? i : best, 0);
  get("amount").textContent = result.positions[place].toFixed(1);
  const distance = Math.abs(result.positions[place]) * direction.length;
  get("note").textContent = `${direction.note}. The feature is moved by ${distance.toPrecision(2)} times the distance to the nearest training image.`;
  photos(get("along"), direction.neighbours[place]);
  bars(get("along-top"), direction.top[place]);
}

function say(sentence, wrong) {
  get("state").textContent = sentence;
  get("state").className = wrong ? "wrong" : "caption";
}

async function ask(file) {
  const request = ++requests;
  result = null;
  get("result").hidden = true;
  get("top").replaceChildren();
  get("looks").hidden = true;
  URL.revokeObjectURL(get("preview").src);
  get("preview").hidden = true;
  if (file.size > limit) return say("The file is too large.", true);
  get("preview").src = URL.createObjectURL(file);
  get("preview").onload = () => { get("preview").hidden = false; };
  say("Classifying …", false);
  let answer;
  try {
    const response = await fetch("answer", { method: "POST", body: file });
    answer = await response.json();
  } catch {
    answer = { error: "The server does not respond." };
  }
  if (request !== requests) return;
  if (answer.error) {
    get("preview").hidden = true;
    get("preview").onload = null;
    return say(answer.error, true);
  }
  result = answer;
  say(file.name, false);
  bars(get("top"), result.top);
  if (result.map) get("map").src = result.map;
  get("looks").hidden = !result.map;
  photos(get("nearest"), result.neighbours);
  get("direction").replaceChildren(...result.directions.map((direction, i) => {
    const option = create("option", direction.name);
    option.value = i;
    return option;
  }));
  get("strength").value = 0;
  move();
  get("result").hidden = false;
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
