"use strict";
// Browser of the conversations of a run. Texts are only ever set as textContent, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const PAGE = 20;
  const controls = ["view", "text", "step", "outcome", "group", "order"];
  let cards = [], page = 0;

  function node(tag, kind, text) {
    const made = document.createElement(tag);
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function number(value) {
    if (value === null) return "no score";
    const shown = Number(value.toPrecision(3));
    return (shown > 0 ? "+" : "") + (Math.abs(shown) >= 1e6 ? shown.toExponential(2) : String(shown));
  }

  // A card: replies to one prompt. Held-out: one per measurement; training: one group of one step.
  const groups = { held_out: new Map(), train: new Map() };
  for (const row of data.rows) {
    const key = row.phase === "train" ? `${row.step}/${row.group ?? row.prompt}` : row.prompt;
    const all = groups[row.phase];
    if (!all.has(key)) all.set(key, []);
    all.get(key).push(row);
    row.lower = row.messages.map((each) => each.text).join("\n").toLowerCase();
  }
  const lowered = data.prompts.map((each) => [each.id, ...each.messages.map((message) => message.text)].join("\n").toLowerCase());

  function fillSteps() {
    const steps = [...new Set(data.rows.filter((row) => row.phase === $("view").value).map((row) => row.step))];
    const held = $("view").value === "held_out";
    const options = [[held ? "last" : "", held ? "last measurement" : "all steps"]].concat(steps.map((step) => [String(step), `step ${step}`]));
    $("step").replaceChildren(...options.map(([value, words]) => Object.assign(node("option", "", words), { value })));
    for (const option of document.querySelectorAll("#outcome .held")) option.hidden = option.disabled = !held;
    if ($("outcome").selectedOptions[0].disabled) $("outcome").value = "";
  }

  // Rows of a card to show: before and after for held-out prompts, all replies of a group for training.
  function shown(rows, step) {
    if (rows[0].phase === "train") return [...rows].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
    const last = step === "last" ? rows.at(-1) : rows.find((row) => String(row.step) === step);
    if (!last) return [];
    return rows[0] === last ? [last] : [rows[0], last];
  }

  function select() {
    const words = $("text").value.toLowerCase(), step = $("step").value, outcome = $("outcome").value;
    const group = $("group").value.trim();
    function fits(row, rows) {
      if (outcome === "right") return row.right === true;
      if (outcome === "wrong") return row.right === false;
      if (outcome === "better") return row.right === true && rows[0].right === false;
      if (outcome === "worse") return row.right === false && rows[0].right === true;
      if (outcome === "unfinished") return row.finished === false;
      if (outcome === "failed") return row.reward === null;
      return true;
    }
    cards = [];
    for (const all of groups[$("view").value].values()) {
      const first = all[0], train = first.phase === "train";
      if (train && step && String(first.step) !== step) continue;
      if (group && String(first.group) !== group && data.prompts[first.prompt].id !== group) continue;
      const rows = shown(all, step);
      if (!rows.length) continue;
      if (words && !lowered[first.prompt].includes(words) && !rows.some((row) => row.lower.includes(words))) continue;
      const judged = train ? rows : rows.slice(-1);
      if (!judged.some((row) => fits(row, rows))) continue;
      cards.push(rows);
    }
    const spread = (rows) => {
      const values = rows.map((row) => row.reward).filter((value) => value !== null);
      return values.length ? (rows[0].phase === "train" ? Math.max(...values) - Math.min(...values) : Math.abs(values.at(-1) - values[0])) : -1;
    };
    const value = (rows) => (rows[0].phase === "train" ? rows[0] : rows.at(-1)).reward ?? -Infinity;
    const keys = { spread: (rows) => -spread(rows), low: value, high: (rows) => -value(rows) };
    const key = keys[$("order").value];
    if (key) cards = cards.map((rows) => [key(rows), rows]).sort((a, b) => (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0)).map((each) => each[1]);
    page = 0;
    draw();
  }

  // Rewards of steps are coloured between the lowest and the highest of the run, which are at least 0 and 1 apart.
  const steps = data.rows.flatMap((row) => row.messages.flatMap((each) => (each.steps ?? []).map((step) => step[1] ?? 0)));
  const low = steps.reduce((a, b) => Math.min(a, b), 0), high = steps.reduce((a, b) => Math.max(a, b), 1);

  function message(each, kind) {
    const made = node("p", `text ${kind}`, each.steps ? undefined : each.text || "(nothing)");
    made.dir = "auto";
    for (const [text, reward] of each.steps ?? []) {
      if (reward === null) {
        made.append(text);
        continue;
      }
      const body = text.trimStart(), step = node("span", "step", body);
      step.style.setProperty("--share", `${(100 * (reward - low)) / (high - low)}%`);
      step.title = `reward of this step: ${number(reward)}`;
      step.append(node("small", "", number(reward)));
      made.append(text.slice(0, text.length - body.length), step);
    }
    return made;
  }

  function reply(row, words) {
    const made = node("div", `reply ${row.right === true ? "good" : row.right === false ? "bad" : ""}`);
    const head = node("p", "numbers");
    if (words) head.append(node("span", "", words));
    if (row.right !== null) head.append(node("span", row.right ? "good" : "bad", row.right ? "✓ right" : "✗ wrong"));
    head.append(node("strong", "", number(row.reward)));
    if (row.advantage !== null) head.append(node("span", "", `advantage ${number(row.advantage)}`));
    if (row.tokens !== null) head.append(node("span", "", `${row.tokens} tokens`));
    if (row.finished === false) head.append(node("span", "bad", "cut"));
    for (const [name, value] of Object.entries(row.components ?? {})) head.append(node("span", "", `${name} ${value === null ? "–" : number(value)}`));
    for (const value of Object.values(row.verdicts ?? {})) head.append(node("span", "", value));
    made.append(head);
    for (const each of row.messages) {
      if (row.messages.length > 1) made.append(node("small", "", each.role));
      made.append(message(each, each.role));
    }
    return made;
  }

  function card(rows, index) {
    const first = rows[0], prompt = data.prompts[first.prompt], made = node("article", "card row");
    made.tabIndex = 0;
    const where = first.phase === "train" ? `step ${first.step} · group ${first.group ?? "?"} · ` : "";
    made.setAttribute("aria-label", `conversation ${index + 1} of ${cards.length}`);
    const title = node("p", "soft", `${where}prompt ${prompt.id}`);
    title.dir = "auto";
    made.append(title);
    for (const each of prompt.messages) {
      const box = node("div", "prompt");
      box.append(node("small", "", each.role), message(each, ""));
      made.append(box);
    }
    const sides = node("div", "sides");
    for (const row of rows) {
      let words = "";
      if (row.phase !== "train") {
        words = row.step === data.start ? "before training" : `after step ${row.step}`;
      }
      sides.append(reply(row, words));
    }
    if (rows.length > 2) sides.classList.add("many");
    made.append(sides);
    return made;
  }

  function draw() {
    const pages = Math.max(1, Math.ceil(cards.length / PAGE));
    page = Math.min(Math.max(0, page), pages - 1);
    const start = page * PAGE;
    $("cards").replaceChildren(...cards.slice(start, start + PAGE).map((rows, i) => card(rows, start + i)));
    const what = $("view").value === "train" ? "group" : "prompt";
    $("count").textContent = cards.length
      ? `${cards.length.toLocaleString("en")} ${what}${cards.length === 1 ? "" : "s"} · page ${page + 1} of ${pages}`
      : "No conversation fits these filters.";
    $("previous").disabled = page === 0;
    $("next").disabled = page === pages - 1;
  }

  function turn(by) {
    page += by;
    draw();
    $("browser").scrollIntoView();
  }

  let waiting;
  for (const id of controls) {
    $(id).addEventListener("input", () => {
      if (id === "view") fillSteps();
      clearTimeout(waiting);
      waiting = setTimeout(select, ["text", "group"].includes(id) ? 150 : 0);
    });
  }
  $("previous").addEventListener("click", () => turn(-1));
  $("next").addEventListener("click", () => turn(1));
  for (const option of [...$("view").options]) if (!groups[option.value].size) option.remove();
  fillSteps();
  select();
})();
