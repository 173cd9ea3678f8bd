// The dashboard's pages: all runs, one run live, a search. Text goes in as text, never as markup. A timeline is one
// canvas whatever the number of ranks; incidents come a page at a time.
"use strict";
const main = document.getElementById("main");
const COLOURS = { queued: "#8c8c8c", launch: "#7f96ab", init: "#5590c8", restore: "#3d85c6", step: "#4c9f70", lost_step: "#dd9d2e",
  partial_step: "#d9b45c", data_wait: "#9486bf", snapshot_stall: "#8e7cc3", eval: "#56aaa3", detect: "#d42a2a", teardown: "#d65f5f",
  rebuild: "#c98080", finish: "#7fa888", degraded: "#9a7a15", unattributed: "#444444" };
const PAGE = 100;
let source = null, generation = 0;

const make = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element[key === "class" ? "className" : key] = value;
  element.append(...children.filter((child) => child !== null && child !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return element;
};
const percent = (v) => (v === null || v === undefined ? "-" : (100 * v).toFixed(2) + " %");
const number = (v, digits = 2) => (v === null || v === undefined ? "-" : v.toFixed(digits));
const duration = (s) => s === null || s === undefined ? "-" : s < 1 ? s.toFixed(3) + " s" : s < 60 ? s.toFixed(1) + " s" : s < 3600 ? Math.floor(s / 60) + " min " + Math.floor(s % 60) + " s"
  : s < 86400 ? Math.floor(s / 3600) + " h " + Math.floor((s % 3600) / 60) + " min" : Math.floor(s / 86400) + " d " + Math.floor((s % 86400) / 3600) + " h";
const table = (head, rows) => make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...head.map(([name, kind]) => make("th", { class: kind || "" }, name)))),
  make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells.map((cell, i) => make("td", { class: head[i][1] || "" }, cell)))))));
const get = async (path) => {
  const answer = await fetch(path);
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.error || answer.statusText);
  return data;
};
const link = (run) => make("a", { href: "#" + encodeURIComponent(run) }, run);

const showRuns = async (mine) => {
  const { root, runs } = await get("/api/runs");
  if (mine !== generation) return;
  const unread = runs.filter((r) => r.created === undefined).length;
  const rows = runs.map((r) => r.created === undefined ? [link(r.run_id), make("span", { class: "dim" }, "being read ..."), "", "", "", "", "", "", ""] : r.problem ? [link(r.run_id), (r.created || "").slice(0, 19), make("span", { class: "bad" }, r.problem), "", "", "", "", "", ""]
    : [link(r.run_id), (r.created || "").slice(0, 19).replace("T", " "), r.code === null ? make("span", { class: "warn" }, "not ended") : r.code === 0 ? make("span", { class: "good" }, "done") : make("span", { class: "bad", title: r.reason || "" }, "code " + r.code),
      r.steps, r.slots, percent(r.training_goodput), percent(r.infrastructure_goodput), r.num_incidents, (r.tags || []).join(" ")]);
  main.replaceChildren(make("p", { class: "dim" }, runs.length + (runs.length === 1 ? " run in " : " runs in ") + root),
    table([["run"], ["created"], ["result"], ["steps", "n"], ["ranks", "n"], ["goodput", "n"], ["infrastructure", "n"], ["incidents", "n"], ["tags"]], rows));
  setTimeout(() => { if (mine === generation && !document.hidden) showRuns(mine).catch(() => {}); }, unread ? 1000 : 5000);
};

const showSearch = async (mine, words) => {
  const hits = await get("/api/search?q=" + encodeURIComponent(words));
  if (mine !== generation) return;
  main.replaceChildren(make("p", { class: "dim" }, hits.length + " runs have all of: " + words),
    ...hits.map((hit) => make("section", {}, make("h2", {}, link(hit.run_id)), make("p", { class: "dim" }, [(hit.created || "").slice(0, 19).replace("T", " "), hit.reason || "not ended", hit.steps + " steps", "goodput " + percent(hit.training_goodput), hit.num_incidents + " incidents"].join(", ")), ...hit.places.map((p) => make("p", {}, make("b", {}, p.source + ": "), p.excerpt)))));
};

const drawTimeline = (canvas, t, marks, wall) => {
  const raw = atob(t.cells), height = Math.max(1, Math.min(12, Math.floor(640 / t.slots)));
  canvas.width = t.columns; canvas.height = t.slots * height;
  canvas.style.height = Math.max(60, Math.min(640, t.slots * Math.max(height, 14))) + "px";
  const paint = canvas.getContext("2d"), image = paint.createImageData(canvas.width, canvas.height), pixels = new Uint32Array(image.data.buffer);
  const codes = Object.keys(COLOURS).map((state) => { const c = parseInt(COLOURS[state].slice(1), 16); return (255 << 24 | (c & 255) << 16 | (c >> 8 & 255) << 8 | c >> 16) >>> 0; });
  for (let slot = 0; slot < t.slots; slot++)
    for (let line = 0; line < height; line++) {
      const at = (slot * height + line) * t.columns, from = slot * t.columns;
      for (let c = 0; c < t.columns; c++) pixels[at + c] = line === height - 1 && height > 3 ? 0 : codes[raw.charCodeAt(from + c)];
    }
  paint.putImageData(image, 0, 0);
  paint.fillStyle = "#c00000";
  for (const m of marks) if (m.rank !== null) paint.fillRect(m.t / wall * t.columns - 1, m.rank * height, 3, Math.max(2, height - 1));
};

const showRun = async (mine, run) => {
  const cards = make("div", { class: "cards" }), facts = make("div", { class: "headline" }), canvas = make("canvas", { tabIndex: 0 }), tip = make("span", { id: "tip" });
  canvas.setAttribute("role", "img"); canvas.setAttribute("aria-label", "Timeline of every rank by state");
  const legend = make("ul", { class: "legend" }), ranks = make("div"), incidents = make("div"), about = make("div"), end = make("span"), axis = make("p", { class: "axis dim" }, make("span", {}, "start"), tip, end);
  main.replaceChildren(make("h2", {}, run), facts, cards, make("h2", {}, "Timeline"), canvas, axis, legend, make("h2", {}, "Incidents"), incidents, make("h2", {}, "Ranks"), ranks, make("h2", {}, "About this run"), about);
  let shown = null, state = null, known = -1, page = null;

  const drawStatus = (s) => {
    const kind = s.state === "ended" && s.code === 0 || s.state === "running" ? "good" : s.state === "died" || s.state === "ended" ? "bad" : "warn";
    const list = [["state", make("span", { class: kind }, s.state === "ended" && !s.code ? "done" : s.state + (s.code ? " with " + s.code : ""))], ["step", s.step + (s.total ? " / " + s.total : "")], ["loss", number(s.loss, 4)],
      ["training goodput", percent(s.training_goodput)], ["infrastructure goodput", percent(s.infrastructure_goodput)], ["generation", s.generation],
      ["incidents recovered", s.num_recovered + " of " + s.num_incidents], ["steps lost", s.steps_lost], ["s a step", number(s.step_s, 3)],
      ["tokens/s", s.tokens_per_s ? Math.round(s.tokens_per_s).toLocaleString() : "-"], ["wall", duration(s.wall_s)]];
    if (s.eta_s !== null) list.push(["left", duration(s.eta_s)]);
    if (s.max_restarts !== null) list.push(["restarts used", s.restarts + " of " + s.max_restarts]);
    for (const [tier, t] of Object.entries(s.saves.tiers)) list.push(["newest " + (tier === "disk" ? "on " : "in ") + tier + ", " + duration(t.age_s) + " old, " + t.rollback_steps + " steps behind", "step " + t.step]);
    if (s.saves.host_bytes) list.push(["host memory of snapshots", (s.saves.host_bytes / 1e9).toFixed(2) + " GB"]);
    if (s.saves.backlog) list.push(["saves waiting for storage", s.saves.backlog]);
    cards.replaceChildren(...list.map(([name, value]) => make("div", {}, make("b", {}, value), name)));
    facts.replaceChildren(...s.headline.map(([kind, text]) => make("p", { class: kind }, text)));
    const slow = new Set(s.stragglers.map((x) => x.rank));
    const few = s.ranks.length <= 64 ? s.ranks : [...s.ranks].sort((a, b) => slow.has(b.rank) - slow.has(a.rank) || a.step - b.step || b.since_s - a.since_s).slice(0, 32);
    ranks.replaceChildren(make("p", { class: "dim" }, few.length < s.ranks.length ? "the " + few.length + " farthest behind of " + s.ranks.length : ""),
      table([["rank", "n"], ["state"], ["last step", "n"], ["since", "n"], ["s a step", "n"]], few.map((r) => [r.rank, r.state, r.step, duration(r.since_s), number(r.step_s, 3)])));
    state = s;
    if (s.num_incidents !== known) { known = s.num_incidents; drawIncidents(page === null ? Math.max(0, Math.floor((known - 1) / PAGE)) : page).catch(() => {}); }
  };
  const drawRest = (v) => {
    shown = v;
    end.textContent = duration(v.wall_s);
    drawTimeline(canvas, v.timeline, v.marks, v.wall_s);
    legend.replaceChildren(...Object.entries(v.states_s).sort((a, b) => b[1] - a[1]).map(([name, seconds]) => {
      const swatch = make("span", { class: "sw" });
      swatch.style.background = COLOURS[name];
      return make("li", {}, swatch, name + " " + percent(v.wall_s ? seconds / v.wall_s : 0));
    }));
  };
  const drawIncidents = async (at) => {
    const { total, incidents: rows } = await get("/api/runs/" + encodeURIComponent(run) + "/incidents?limit=" + PAGE + "&offset=" + at * PAGE);
    if (mine !== generation) return;
    if (!total) { incidents.replaceChildren(make("p", { class: "dim" }, "None.")); return; }
    const turn = (to) => { page = to; drawIncidents(to).catch(() => {}); }, last = Math.floor((total - 1) / PAGE);
    const older = make("button", { disabled: at === 0, onclick: () => turn(at - 1) }, "earlier"), newer = make("button", { disabled: at >= last, onclick: () => turn(at + 1) }, "later");
    const cause = (text) => {
      const lines = (text || "-").trim().split("\n");
      return lines.length < 2 ? lines[0] : make("details", {}, make("summary", {}, lines[lines.length - 1]), make("pre", {}, text));
    };
    incidents.replaceChildren(make("div", { class: "pager" }, older, newer, (at * PAGE + 1) + " to " + (at * PAGE + rows.length) + " of " + total),
      table([["", "n"], ["class"], ["injected"], ["rank", "n"], ["where"], ["rung"], ["detected", "n"], ["first step", "n"], ["lost", "n"], ["root cause"]],
        rows.map((i) => [i.number, i.class, i.injected.join(" ") || "-", i.rank, [i.phase, i.step === null ? null : "step " + i.step].filter(Boolean).join(" of ") || "-", i.rung || "open", duration(i.detected_s), i.first_step_s === null ? make("span", { class: "bad" }, "not recovered") : duration(i.first_step_s), i.steps_lost, cause(i.root_cause)])));
  };
  const names = Object.keys(COLOURS);
  canvas.addEventListener("pointermove", (event) => {
    if (!shown) return;
    const t = shown.timeline, box = canvas.getBoundingClientRect();
    const column = Math.min(t.columns - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * t.columns))), slot = Math.min(t.slots - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * t.slots)));
    const code = atob(t.cells.slice(4 * Math.floor((slot * t.columns + column) / 3), 4 * Math.floor((slot * t.columns + column) / 3) + 4)).charCodeAt((slot * t.columns + column) % 3);
    tip.textContent = "rank " + slot + ", " + duration(column / t.columns * shown.wall_s) + " from the start: " + names[code];
  });

  const view = await get("/api/runs/" + encodeURIComponent(run));
  if (mine !== generation) return;
  drawStatus(view.status); drawRest(view);
  about.replaceChildren(table([[""], [""]], Object.entries(view.about).map(([name, text]) => [name, make("code", {}, text)])));
  document.documentElement.dataset.drawn = "yes";
  if (["ended", "died"].includes(state.state)) return;
  source = new EventSource("/api/runs/" + encodeURIComponent(run) + "/events");
  source.addEventListener("status", (event) => drawStatus(JSON.parse(event.data)));
  source.addEventListener("timeline", (event) => drawRest(JSON.parse(event.data)));
  source.addEventListener("over", () => source.close());
  source.addEventListener("problem", (event) => { facts.append(make("p", { class: "bad" }, JSON.parse(event.data))); source.close(); });
};

const route = () => {
  if (source) { source.close(); source = null; }
  const mine = ++generation, where = decodeURIComponent(location.hash.slice(1));
  const work = !where ? showRuns(mine) : where.startsWith("?") ? showSearch(mine, where.slice(1)) : showRun(mine, where);
  work.catch((error) => { if (mine === generation) main.replaceChildren(make("p", { class: "bad" }, error.message)); });
};
document.getElementById("search").addEventListener("submit", (event) => {
  event.preventDefault();
  location.hash = "#" + encodeURIComponent("?" + document.getElementById("words").value);
});
addEventListener("hashchange", route);
if (location.search) history.replaceState(null, "", location.pathname + location.hash); // the token leaves the address
route();
