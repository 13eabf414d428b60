// The live page. All text comes from files of users and is set with textContent only.
"use strict";
const $ = id => document.getElementById(id), AXES = ["step", "samples", "time"], MOST_CHARTS = 24, MOST_RUNS = 8, MOST_ROWS = 200, SPACINGS = [.1, .5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 3600, 7200, 18000, 36000, 72000, 180000, 360000, 720000];
const tracks = new Map(), charts = new Map();
let rows = [], now = 0, picked = [], axis = "step", source = null, lastId = "", opens = 0, listed = "", zoomed = false, allRows = false, begun = false, shown = MOST_CHARTS, healthValue = "gradient", due = 0, waits = false, drawn = 0, drawing = 0;

function el(tag, name, ...inside) {
  const found = document.createElement(tag);
  if (name) found.className = name;
  found.append(...inside.filter(x => x !== null && x !== undefined && x !== ""));
  return found;
}
const color = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const whole = v => Number.isFinite(v) ? Math.round(v).toLocaleString("en-US") : "–";
function number(v) {
  if (typeof v === "string") return v;
  if (!Number.isFinite(v)) return "–";
  const size = Math.abs(v);
  if (Number.isInteger(v) && size < 1e7) return v.toLocaleString("en-US");
  return size !== 0 && (size < 1e-3 || size >= 1e7) ? v.toExponential(2).replace("e+", "e") : size >= 100 ? v.toLocaleString("en-US", {maximumFractionDigits: 1}) : v.toFixed(4);
}
function bytes(v) { let i = 0; while (v >= 1024 && i < 4) { v /= 1024; i++; } return (i && v < 100 ? v.toPrecision(3) : Math.round(v)) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][i]; }
function clock(s) {
  if (!Number.isFinite(s)) return "–";
  if (s < 100) return +s.toFixed(s < 10 ? 1 : 0) + " s";
  const m = Math.round(s / 60);
  return m < 100 ? m + " min" : Math.floor(m / 60) + ":" + String(m % 60).padStart(2, "0") + " h";
}
function ago(time) {
  const s = Math.max(0, now - time);
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (s >= size) return Math.floor(s / size) + " " + unit + " ago";
  return "just now";
}

// What differs between runs: arguments, plan, commit, and the facts of the start.
function settings(row) {
  const found = {}, start = row.start || {}, words = Array.isArray(start.arguments) ? start.arguments.map(String) : [];
  for (let i = 0; i < words.length; i++) {
    const at = words[i].match(/^--?([^=\s]+?)(?:=([\s\S]*))?$/);
    if (!at) found["argument " + (i + 1)] = words[i];
    else if (at[2] !== undefined) found[at[1]] = at[2];
    else if (i + 1 < words.length && (!words[i + 1].startsWith("-") || !isNaN(words[i + 1]))) found[at[1]] = words[++i];
    else found[at[1]] = "yes";
  }
  for (const [key, value] of Object.entries(start.plan || {})) found["plan." + key] = Array.isArray(value) ? value.join(" ") : value;
  if (start.git && start.git.commit) found.commit = String(start.git.commit).slice(0, 8) + (start.git.dirty ? " + changes" : "");
  if (start.origin) found.origin = start.origin;
  for (const key of ["script", "model", "parameters", "optimizer", "samples", "workers", "device", "host"]) if (start[key] !== undefined && !(key in found)) found[key] = start[key];
  for (const [key, value] of Object.entries(start.versions || {})) found[key + " version"] = value;
  return found;
}
function differing(all) {
  const values = new Map();
  for (const found of all) for (const key in found) if (!values.has(key)) values.set(key, new Set());
  for (const [key, set] of values) for (const found of all) set.add(String(found[key] ?? ""));
  const keys = [...values].filter(([, set]) => set.size > 1).map(([key]) => key), same = key => all.map(found => String(found[key] ?? "")).join("\n");
  const workers = keys.includes("workers") && same("workers");
  return keys.filter(key => key !== "plan.workers" || same(key) !== workers);
}

async function list() {
  try {
    const answer = await fetch("runs");
    if (!answer.ok) throw new Error(answer.status);
    const text = await answer.text(), told = JSON.parse(text), key = text.replace(/"now":[^,]*,/, "");
    now = told.now;
    if (!source) status(true);
    if (key === listed && $("table").firstChild) return;
    listed = key; rows = told.runs; jobs = told.jobs;
    $("folder").textContent = told.folder;
    if (begun && !picked.length && !opened && rows.length) pick([rows[0].name]);
    table(); jobTable(); about();
  } catch { if (!source) status(false); }
}
function status(isOn) { $("live").textContent = isOn ? "live" : "connecting again"; $("live").className = isOn ? "on" : ""; }
function table() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean), all = rows.map(row => [row, settings(row)]);
  const found = all.filter(([row, set]) => { const text = (row.name + " " + row.status + " " + Object.entries(set).flat().join(" ")).toLowerCase(); return words.every(w => text.includes(w)); });
  $("count").textContent = found.length === rows.length ? rows.length || "" : found.length + " of " + rows.length;
  const keys = differing(found.map(([, set]) => set)), values = new Set(found.flatMap(([row]) => Object.keys(row.evaluation || {})).filter(k => k !== "loss"));
  const metrics = [...values].slice(0, 3), head = el("tr"), body = el("tbody"), numbers = new Set(keys.filter(k => found.every(([, set]) => set[k] === undefined || (set[k] !== "" && !isNaN(set[k])))));
  for (const [name, kind] of [["run", ""], ["status", ""], ["step", "number"], ["loss", "number"], ...metrics.map(m => [m, "number"]), ...keys.map(k => [k, "differs" + (numbers.has(k) ? " number" : "")]), ["written", ""]]) {
    const cell = el("th", kind, name); cell.scope = "col"; if (kind.startsWith("differs")) cell.title = "differs between these runs"; head.append(cell);
  }
  const rest = allRows ? 0 : Math.max(0, found.length - MOST_ROWS), more = el("button", "more", `${whole(rest)} more`);
  more.onclick = () => { allRows = true; table(); };
  for (const [row, set] of found.slice(0, found.length - rest)) {
    const line = el("tr"); line.dataset.name = row.name;
    line.onclick = () => pick([row.name]);
    line.append(el("td", "cut", pickBox(row.name), row.name), el("td", "", el("span", "status " + row.status, row.status + (row.alerts ? ` · ${row.alerts} alert${row.alerts > 1 ? "s" : ""}` : ""))),
      el("td", "number", whole(row.step)), el("td", "number", number(row.loss)), ...metrics.map(m => el("td", "number", number((row.evaluation || {})[m]))),
      ...keys.map(k => { const cell = el("td", numbers.has(k) ? "number" : "cut", String(set[k] ?? "–")); cell.title = String(set[k] ?? ""); return cell; }), el("td", "", ago(row.written)));
    body.append(line);
  }
  const empty = rows.length ? el("p", "empty", "No run matches the filter.") : el("p", "empty", "No runs here yet. ", el("code", "", "ronde run train.py"), " makes one, and it appears by itself.");
  $("table").replaceChildren(found.length ? el("table", "", el("thead", "", head), body) : empty, rest ? more : "");
  $("table").classList.toggle("wide", found.length > 0); paint();
}
function paint() { // which rows are in the curves
  for (const line of document.querySelectorAll("tr[data-name]")) {
    const name = line.dataset.name, at = picked.indexOf(name), box = line.querySelector(".pick");
    line.classList.toggle("on", at >= 0);
    if (!box) continue;
    box.setAttribute("aria-label", (at >= 0 ? "Remove " : "Add ") + name + " to the curves");
    box.style.background = box.style.borderColor = at >= 0 ? `var(--c${at % 8})` : "";
  }
}

function pickBox(name) {
  const box = el("button", "pick");
  box.onclick = click => { click.stopPropagation(); pick(picked.includes(name) ? picked.filter(n => n !== name) : [...picked, name].slice(-MOST_RUNS)); };
  return box;
}
// A run of a job has a long name: search/trials/t003, flow/steps/train/train-12ab/run.
const nick = name => (name.match(/\/trials\/([^/]+)$/) || name.match(/\/steps\/([^/]+)\/[^/]+(?:\/run)?$/) || [name, name])[1];

// One stream for all picked runs. The id of each message says how much of each file is here.
function pick(names) {
  picked = names;
  for (const name of tracks.keys()) if (!names.includes(name)) tracks.delete(name);
  for (const name of names) if (!tracks.has(name)) tracks.set(name, blank());
  lastId = lastId.split(",").filter(part => names.includes(part.slice(0, part.lastIndexOf("/")))).join(",");
  remember(); zoomed = false; rebuild(); paint(); connect(); logs(true);
}
const remember = () => history.replaceState(null, "", "#" + new URLSearchParams([...(opened ? [["job", opened]] : []), ...picked.map(n => ["run", n]), ["x", axis], ["log", $("log").checked ? 1 : 0], ["smooth", $("smooth").checked ? 1 : 0]]));
const rowOf = name => rows.find(r => r.name === name) || job?.runs.find(r => r.name === name);
function connect() {
  if (source) source.close();
  source = null;
  if (!picked.length) return;
  const mine = source = new EventSource("events?" + new URLSearchParams([...picked.map(n => ["run", n]), ["from", lastId]]));
  source.onopen = () => { opens++; status(true); };
  source.onerror = () => {
    status(false);
    if (mine.readyState === EventSource.CLOSED) setTimeout(() => { if (source === mine) connect(); }, 2000);
  };
  source.onmessage = message => { lastId = message.lastEventId; const told = Object.assign(...JSON.parse(message.data)); take(told); later(Boolean(told.more)); };
}

// A run as far as its lines are here. A table has columns of one length, cut together by a resume.
const blank = () => ({tables: new Map(), events: [], bands: [], tensors: null, layers: null, health: [], hosts: new Map(), start: null, end: null, open: null, last: null, before: null, rate: null, t0: null});
function put(track, name, columns, y) {
  let t = track.tables.get(name);
  if (!t) track.tables.set(name, t = {step: [], samples: [], time: [], y: []});
  for (const key of AXES) for (const v of columns[key]) t[key].push(v);
  for (const v of y) t.y.push(v);
}
function place(track, step, time) { // samples are counted with the steps; between them they are interpolated
  const a = track.before, b = track.last;
  if (!b) return {step: step ?? 0, samples: 0, time};
  if (step === undefined || step === null) return {step: b.step, samples: b.samples, time};
  const each = a && b.step > a.step ? (b.samples - a.samples) / (b.step - a.step) : b.samples / (b.step || 1);
  return {step, samples: Math.round(b.samples + (step - b.step) * each), time};
}
function cut(track, prefix, step) {
  for (const [name, t] of track.tables) {
    if (prefix ? !name.startsWith(prefix) : track.parts?.some(p => name.startsWith(p + "/"))) continue;
    let n = t.step.length;
    while (n && t.step[n - 1] > step) n--;
    for (const key in t) t[key].length = n;
  }
  track.events = track.events.filter(e => e.kind !== "best" || e.at.step <= step);
}
function take(message) {
  if (message.reset) tracks.set(message.run, blank());
  const track = tracks.get(message.run);
  if (!track || !message.events) return;
  if (message.file === "health") return message.events.forEach(e => health(track, e));
  if (message.file === "resources") return message.events.forEach(e => { if (!track.hosts.has(e.host)) track.hosts.set(e.host, []); track.hosts.get(e.host).push(e); });
  for (const resume of message.events.filter(e => e.type === "resume")) { // before all steps of its message
    cut(track, resume.part ? resume.part + "/" : "", resume.step);
    if (!resume.part) { track.last = {step: resume.step, samples: resume.samples, time: resume.time}; track.before = null; }
  }
  for (const [part, c] of Object.entries(message.steps)) {
    const prefix = part ? part + "/" : "";
    if (part && !(track.parts ??= []).includes(part)) track.parts.push(part);
    put(track, prefix + "loss", c, c.loss); put(track, prefix + "learning rate", c, c.lr);
    if (part || !c.step.length) continue;
    const point = i => ({step: c.step[i], samples: c.samples[i], time: c.time[i]}), n = c.step.length, after = track.open ? c.time.findIndex(t => t >= track.open.from.time) : -1;
    track.t0 ??= c.time[0];
    if (after >= 0) { track.open.to = point(after); track.open = null; }
    track.before = n > 1 ? point(n - 2) : track.last; track.last = point(n - 1);
  }
  message.events.forEach(e => { try { event(track, e); } catch (error) { console.error("an event is not shown", error); } });
}
function event(track, e) {
  const prefix = e.part ? e.part + "/" : "", at = place(track, e.step, e.time), alone = {step: [at.step], samples: [at.samples], time: [at.time]}, note = (kind, text, ...more) => track.events.push({kind, at, time: e.time, text, more: more.filter(Boolean), rank: e.rank});
  const values = (names, found) => { for (const [name, v] of Object.entries(found || {})) if (typeof v === "number") put(track, names + name, alone, [v]); };
  const band = () => { if (!track.open) track.bands.push(track.open = {kind: e.type, from: {...(track.last || at), time: e.time}, to: null}); };
  if (e.type === "start" && !e.part) { track.start = e; track.end = null; track.t0 ??= e.time; }
  else if (e.type === "end" && !e.part) { track.end = e; if (e.status !== "completed") note(e.status === "failed" ? "failed" : "end", e.error || e.status); }
  else if (e.type === "epoch") { if (!e.part && e.samples_per_second) track.rate = e.samples_per_second; }
  else if (e.type === "evaluate") values(prefix + (e.name || "evaluate") + "/", e.metrics);
  else if (e.type === "log") for (const [k, v] of Object.entries(e.values || {})) { if (typeof v === "number") put(track, prefix + (["loss", "learning rate"].includes(k) ? "log/" : "") + k, alone, [v]); }
  else if (e.type === "alert") note("alert", `${e.rule}${e.tensor ? " in " + e.tensor : ""}: ${e.text}`, [e.place, Number.isInteger(e.rank) ? "rank " + e.rank : ""].filter(Boolean).join(" · "), e.remedy && "try: " + e.remedy, e.again);
  else if (e.type === "resume") note("resume", `resumed at step ${whole(e.step)} on ${e.workers} worker${e.workers === 1 ? "" : "s"}`, e.checkpoint);
  else if (e.type === "restart") { band(); note("restart", e.reason); }
  else if (e.type === "hang") { if (!e.slow) band(); note("hang", e.sentence, e.place); }
  else if (e.type === "non_finite") note("non_finite", `${e.what} was not finite; ${e.action}`, e.ranks && e.ranks.length ? "ranks " + e.ranks.join(", ") : "", e.samples && e.samples.length ? "samples " + e.samples.slice(0, 16).join(", ") + (e.samples.length > 16 ? ", …" : "") : "");
  else if (e.type === "warning") { if (!track.events.some(x => x.kind === "warning" && x.text === e.text)) note("warning", e.text); }
  else if (e.type === "best") track.events = track.events.filter(x => x.kind !== "best"), note("best", `best ${e.metric} so far: ${number(e.value)}`, e.path);
}
function health(track, e) {
  if (e.type === "tensors") { track.tensors = e; track.layers = e.layers || []; return; }
  let n = track.health.length; // a step that is there already is trained again after a resume
  while (n && track.health[n - 1].step >= e.step) n--;
  track.health.push(...track.health.splice(n).filter(h => h.step === e.step && h.type !== e.type), e);
}

// Curves.
function later(more) { // drawing takes a fifth of the time at most; with more to come, once a second
  if (due && (more || !waits)) return;
  clearTimeout(due); waits = more;
  due = setTimeout(() => { due = 0; const begin = performance.now(); draw(); drawn = performance.now(); drawing = drawn - begin; }, more ? 1000 : Math.max(30, drawn + Math.max(300, 4 * drawing) - performance.now()));
}
function names() {
  const found = new Set(["loss"]);
  for (const t of tracks.values()) for (const name of t.tables.keys()) found.add(name);
  const order = n => n === "loss" ? 0 : n.startsWith("evaluate/") ? 1 : n === "learning rate" ? 4 : n.endsWith("/learning rate") ? 5 : n.includes("/") ? 2 : 3;
  return [...found].filter(n => [...tracks.values()].some(t => t.tables.get(n)?.step.length)).sort((a, b) => order(a) - order(b) || a.localeCompare(b));
}
function smoothed(x, y) { // exponential mean over 2 % of the axis, whatever the spacing
  const over = (x.at(-1) - x[0]) * .02 || 1;
  let mean = null, last = 0;
  return y.map((v, i) => {
    if (v === null) return null;
    const keep = mean === null ? 0 : Math.exp(-(x[i] - last) / over);
    last = x[i];
    return mean = mean === null ? v : keep * mean + (1 - keep) * v;
  });
}
function columns(name) {
  const log = $("log").checked, smooth = $("smooth").checked, found = [];
  for (const run of picked) {
    const track = tracks.get(run), t = track?.tables.get(name);
    const x = t ? axis === "time" ? t.time.map(v => v - track.t0) : t[axis] : [], raw = t ? t.y : [], y = log ? raw.map(v => v > 0 ? v : null) : raw;
    found.push([x, y]);
    if (smooth) found.push([x, x.length ? smoothed(x, y) : []]);
  }
  return found.length === 1 ? found[0] : uPlot.join(found);
}
function span() { // all charts show the same steps
  let low = Infinity, high = -Infinity;
  for (const run of picked) { const track = tracks.get(run), t = track.tables.get("loss"); if (t?.step.length) { const x = i => axis === "time" ? t.time.at(i) - track.t0 : t[axis].at(i); low = Math.min(low, x(0)); high = Math.max(high, x(-1)); } }
  return high > low ? [low, high] : null;
}
const position = (track, at) => axis === "time" ? at.time - track.t0 : at[axis];
function marks(u) { // bands of hangs and restarts, then alerts, resumes, and the best evaluations
  const {ctx, bbox} = u, dpr = devicePixelRatio;
  ctx.save(); ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
  for (const run of picked) {
    const track = tracks.get(run);
    for (const b of track.bands) {
      const from = u.valToPos(position(track, b.from), "x", true), to = u.valToPos(position(track, b.to || {...(track.last || b.from), time: track.end?.time ?? now}), "x", true);
      ctx.globalAlpha = .22; ctx.fillStyle = color(b.kind === "hang" ? "bad" : "warn");
      ctx.fillRect(Math.min(from, to) - dpr, bbox.top, Math.abs(to - from) + 2 * dpr, bbox.height);
    }
    for (const e of track.events) {
      const paint = {alert: "bad", non_finite: "bad", resume: "soft", best: "good"}[e.kind];
      if (!paint) continue;
      const x = Math.round(u.valToPos(position(track, e.at), "x", true));
      ctx.globalAlpha = e.kind === "best" ? .35 : .8; ctx.strokeStyle = ctx.fillStyle = color(paint); ctx.lineWidth = dpr;
      ctx.setLineDash(e.kind === "resume" ? [3 * dpr, 3 * dpr] : []);
      if (e.kind !== "best") { ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke(); }
      ctx.beginPath(); ctx.moveTo(x - 5 * dpr, bbox.top); ctx.lineTo(x + 5 * dpr, bbox.top); ctx.lineTo(x, bbox.top + 7 * dpr); ctx.fill();
    }
  }
  ctx.restore();
}
const short = v => Math.abs(v) >= 1e6 ? +(v / 1e6).toPrecision(4) + "M" : Math.abs(v) >= 1e4 ? +(v / 1e3).toPrecision(4) + "k" : (+v.toPrecision(6)).toLocaleString("en-US", {maximumFractionDigits: 6});
function options(series, extra, width) {
  const line = {stroke: color("soft"), font: "12px system-ui, sans-serif", grid: {stroke: color("line"), width: 1}, ticks: {show: false}};
  const tick = v => v === null ? "" : Math.abs(v) >= 1e4 || v === 0 || Math.abs(v) >= 1e-3 ? short(v) : v.toExponential().replace("e-", "e−");
  return {width, height: 230, series, legend: {live: true, markers: {width: 0, fill: (u, i) => u.series[i].stroke(u, i)}}, cursor: {sync: {key: extra.key}, drag: {x: true, y: false}, points: {size: 6}}, padding: [8, 22, 0, 0],
    scales: {x: {time: false, ...extra.x}, y: extra.y || {}}, hooks: extra.hooks || {},
    axes: [{...line, size: 30, values: (u, all) => all.map(extra.time ? clock : tick), ...(extra.time ? {incrs: SPACINGS} : {})}, {...line, size: (u, all) => 14 + 7 * Math.max(3, ...(all || []).map(v => v.length)), values: (u, all) => all.map(extra.value || tick)}]};
}
function draw() {
  about(); happenings(); heat(); resources(); $("curves").hidden = $("logs").hidden = !picked.length;
  const all = names(), want = all.slice(0, shown);
  for (const name of [...charts.keys()]) if (!want.includes(name)) { charts.get(name).destroy(); charts.delete(name); }
  const box = $("charts");
  if (!want.length) return box.replaceChildren(el("p", "empty", "Nothing is recorded yet. The curves appear with the first steps."));
  for (const old of [...box.children]) if (!want.includes(old.dataset.name)) old.remove();
  const cards = want.map((name, i) => {
    let card = [...box.children].find(c => c.dataset.name === name);
    if (!card) { card = el("div", "card", el("h3", "", name)); card.dataset.name = name; }
    if (box.children[i] !== card) box.insertBefore(card, box.children[i] || null);
    return card;
  });
  want.forEach((name, i) => {
    const data = columns(name), card = cards[i];
    if (!charts.has(name)) {
      const smooth = $("smooth").checked, series = [{label: axis, value: (u, v) => v === null ? "–" : axis === "time" ? clock(v) : whole(v)}];
      picked.forEach((run, k) => {
        const stroke = color("c" + k % 8), label = picked.length > 1 ? nick(run) : name.split("/").at(-1), value = (u, v) => number(v), few = (u, s) => u.data[s].length < 60;
        if (smooth) series.push({stroke: stroke + "40", width: 1, label, value, spanGaps: true, points: {show: false}, class: "raw"});
        series.push({stroke, width: 1.6, label, value, spanGaps: picked.length > 1, points: {show: few, size: 5, fill: stroke}});
      });
      const hooks = {drawClear: [marks], setSelect: [u => { if (u.select.width > 0) zoomed = true; }], ready: [u => { u.over.addEventListener("dblclick", () => { zoomed = false; later(false); }); u.over.addEventListener("pointerleave", () => charts.forEach(latest)); }]};
      charts.set(name, new uPlot(options(series, {key: "curves", time: axis === "time", x: {range: (u, a, b) => span() ?? [a, b]}, y: $("log").checked ? {distr: 3} : {}, hooks}, width(card)), data, card));
    } else { charts.get(name).setData(data, !zoomed); if (zoomed) charts.get(name).redraw(); }
    latest(charts.get(name));
  });
  if (all.length > want.length) {
    const more = el("button", "more", `${all.length - want.length} more`); more.onclick = () => { shown = Infinity; draw(); }; box.append(more);
  }
}
const latest = u => setTimeout(() => { if (u.root.isConnected && !u.root.matches(":hover")) u.setLegend({idx: u.data[0].length - 1}); }); // without a pointer, the legend tells the last values
const width = card => Math.max(200, card.clientWidth - 26);
function rebuild() {
  for (const c of charts.values()) c.destroy();
  charts.clear(); for (const c of hostCharts.values()) c.destroy(); hostCharts.clear(); $("charts").replaceChildren(); draw();
}

// The first picked run: what it is, what happened, its health, its machines, its logs.
const first = () => tracks.get(picked[0]);
function about() {
  const track = first(), row = rowOf(picked[0]);
  if (!track || !row) return $("about").replaceChildren();
  const start = track.start || row.start || {}, plan = start.plan || {}, status = track.end && row.status === track.end.status ? track.end.status : row.status, loss = track.tables.get("loss"), facts = el("dl", "facts");
  const fact = (name, value, remark) => { if (value !== "" && value !== undefined && value !== null) facts.append(el("div", "", el("dt", "", name), el("dd", "", String(value), remark ? el("small", "", remark) : null))); };
  const at = track.last || {}, began = loss?.y.find(v => v !== null), per = start.steps_per_epoch, evaluations = [...track.tables].filter(([n, t]) => n.startsWith("evaluate/") && n !== "evaluate/loss" && t.y.length);
  fact("step", whole(at.step ?? row.step), per && at.step ? `epoch ${number(+(at.step / per).toFixed(1))}, ${whole(at.samples)} samples` : "");
  fact("loss", number(loss?.y.at(-1) ?? row.loss), Number.isFinite(began) ? "from " + number(began) : "");
  for (const [name, t] of evaluations.slice(0, 2)) fact(name.slice(9), number(t.y.at(-1)), "at step " + whole(t.step.at(-1)));
  if (track.rate || track.end?.samples_per_second) fact("speed", whole(track.end?.samples_per_second || track.rate), "samples per second");
  fact("trained", track.t0 && at.time ? clock(at.time - track.t0) : "", "first to last step");
  fact("workers", start.workers, start.device);
  fact("global batch", whole(plan.batch_size), plan.precision);
  fact("model", start.model, start.parameters ? whole(start.parameters) + " parameters" : "");
  if (start.git?.commit) fact("commit", String(start.git.commit).slice(0, 8), start.git.dirty ? "with changes that are not committed" : "");
  const command = [start.script].concat(start.arguments || []).filter(Boolean).join(" ");
  $("about").replaceChildren(el("div", "title", el("h1", "", nick(picked[0])), el("span", "status " + status, status), nick(picked[0]) === picked[0] ? null : el("span", "soft", picked[0]), start.origin ? el("span", "", "from " + start.origin) : null), el("p", "command", command), facts,
    ...(row.error && status === row.status ? [el("p", "error", row.error)] : []));
}
let told = "";
function happenings() {
  const track = first(), body = $("events").querySelector(".body"), found = track ? track.events : [], key = picked[0] + found.length + (found.at(-1)?.time ?? "");
  $("events").hidden = !track;
  if (key === told) return;
  told = key;
  $("events").querySelector("small").textContent = picked.length > 1 ? "of " + nick(picked[0]) : "";
  if (!found.length) return body.replaceChildren(el("p", "empty", "No alert, hang, restart, or warning."));
  const lines = found.slice(-300).reverse().map(e => el("tr", "", el("td", "kind " + e.kind, e.kind.replace("_", " ").replace("non finite", "not finite")), el("td", "", "step " + whole(e.at.step)), el("td", "", e.text, ...e.more.map(m => m.startsWith("ronde ") ? el("small", "", el("code", "again", m)) : el("small", "", m)))));
  body.replaceChildren(el("table", "", el("tbody", "", ...lines)));
}
const MAPS = {gradient: "gradient", weight: "weight", update: "update ÷ weight", same: "unchanged"};
function heat() {
  const track = first(), section = $("health"), body = section.querySelector(".body"), segments = section.querySelector(".segments");
  section.hidden = !track;
  if (!track) return;
  const until = track.last ? track.last.step + 100 : Infinity, lines = track.health.filter(h => h.type === "health" && h.step <= until), t = track.tensors;
  segments.hidden = !lines.length;
  if (!lines.length || !t) { section.querySelector("small").textContent = ""; return body.replaceChildren(el("p", "empty", "Gradients are not measured. ", el("code", "", "ronde run --watch train.py"), " measures them, and they appear here as a map of tensors and steps.")); }
  segments.replaceChildren(...Object.entries(MAPS).map(([key, label]) => { const b = el("button", "", label); b.setAttribute("aria-pressed", key === healthValue); b.onclick = () => { healthValue = key; heat(); }; return b; }));
  section.querySelector("small").textContent = `${t.names.length} tensors, every ${t.every} steps` + (picked.length > 1 ? ", of " + nick(picked[0]) : "");
  const value = (line, k) => { const of = n => { const v = (line[n] || [])[k]; return typeof v === "string" ? NaN : v ?? null; }; if (healthValue !== "update") return of(healthValue); const u = of("update"), w = of("weight"); return u === null ? null : w ? u / w : null; };
  let card = body.querySelector(".card");
  if (!card) { body.replaceChildren(card = el("div", "card", el("canvas", "map"), el("p", "under"))); }
  const canvas = card.querySelector("canvas"), under = card.querySelector(".under"), n = t.names.length, dpr = devicePixelRatio, tall = Math.max(2, Math.min(18, Math.floor(420 / n))), wide = card.clientWidth - 26;
  const gutter = tall >= 12 ? Math.min(8 + 6.2 * Math.max(...t.names.map(n => n.length)), 180, wide * .35) : 0, bottom = 18, room = wide - gutter, bins = Math.min(lines.length, Math.max(1, Math.floor(room / 2)));
  canvas.width = wide * dpr; canvas.height = (n * tall + bottom) * dpr; canvas.style.height = n * tall + bottom + "px";
  const ctx = canvas.getContext("2d"), cells = []; let low = Infinity, high = -Infinity;
  for (let b = 0; b < bins; b++) { // a column shows the largest value of its steps, and a NaN if there is one
    const part = lines.slice(Math.floor(b * lines.length / bins), Math.floor((b + 1) * lines.length / bins));
    cells.push(Array.from({length: n}, (_, k) => { let top = null; for (const line of part) { const v = value(line, k); if (v !== null && (Number.isNaN(v) || top === null || v > top)) top = v; if (Number.isNaN(top)) break; } if (top > 0 || (healthValue === "same" && top === 0)) { low = Math.min(low, top); high = Math.max(high, top); } return top; }));
  }
  const linear = healthValue === "same"; if (linear) { low = 0; high = 1; }
  const stops = ["cold", "mid", "hot"].map(c => color(c).match(/\w\w/g).map(x => parseInt(x, 16))), bad = color("bad");
  const paint = v => { if (Number.isNaN(v)) return bad; if (v === null) return "transparent"; const f = linear ? v : v <= 0 ? 0 : high > low ? Math.log(v / low) / Math.log(high / low) : .5, i = f < .5 ? 0 : 1, g = Math.max(0, Math.min(1, f * 2 - i)); return `rgb(${stops[i].map((c, j) => Math.round(c + (stops[i + 1][j] - c) * g))})`; };
  ctx.scale(dpr, dpr); ctx.font = "11px system-ui, sans-serif"; ctx.textBaseline = "middle";
  cells.forEach((column, b) => column.forEach((v, k) => { ctx.fillStyle = paint(v); ctx.fillRect(gutter + b * room / bins, k * tall, room / bins + .5, tall - (tall > 4 ? 1 : 0)); }));
  ctx.fillStyle = color("soft");
  if (gutter) t.names.forEach((name, k) => { let text = name; while (text.length > 4 && ctx.measureText(text).width > gutter - 10) text = "…" + text.replace(/^…/, "").slice(1); ctx.fillText(text, 0, k * tall + tall / 2); });
  ctx.textBaseline = "alphabetic"; ctx.fillText("step " + whole(lines[0].step), gutter, n * tall + bottom - 4); ctx.textAlign = "right"; ctx.fillText(whole(lines.at(-1).step), wide, n * tall + bottom - 4); ctx.textAlign = "left";
  const range = () => under.replaceChildren(...(linear ? ["all change", el("span", "scale"), "none changes"] : Number.isFinite(low) ? [number(low), el("span", "scale"), number(high)] : ["nothing is above zero"]), el("span", "scale bad"), "not finite");
  range();
  canvas.onpointermove = move => {
    const box = canvas.getBoundingClientRect(), b = Math.floor((move.clientX - box.left - gutter) / room * bins), k = Math.floor((move.clientY - box.top) / tall);
    if (!cells[b] || k >= n || k < 0) return range();
    const from = Math.floor(b * lines.length / bins), to = Math.floor((b + 1) * lines.length / bins) - 1, v = cells[b][k];
    under.textContent = [t.names[k], (t.places || [])[k], (t.frozen || [])[k] ? "frozen" : "", "step " + whole(lines[from].step) + (to > from ? "–" + whole(lines[to].step) + ", largest" : ""), v === null ? "–" : Number.isNaN(v) ? "not finite" : linear ? (100 * v).toFixed(0) + " %" : number(v)].filter(Boolean).join("  ·  ");
  };
  canvas.onpointerleave = range;
}
const hostCharts = new Map();
function resources() {
  const track = first(), section = $("resources"), body = section.querySelector(".body");
  section.hidden = !track;
  if (!track) return;
  section.querySelector("small").textContent = picked.length > 1 ? "of " + nick(picked[0]) : "";
  if (!track.hosts.size) { hostCharts.clear(); return body.replaceChildren(el("p", "empty", "No measurements of the machines. ", el("code", "", "ronde run"), " writes them every 10 s.")); }
  body.querySelector(".empty")?.remove();
  const key = (host, lines) => picked[0] + "/" + host + "/" + (lines.at(-1).gpu || []).length;
  for (const [host, lines] of track.hosts) {
    if ([...body.children].some(c => c.dataset.key === key(host, lines))) continue;
    const card = el("div", "card", el("h3", "", host, el("small"))); card.dataset.key = key(host, lines); body.append(card);
  }
  for (const [host, lines] of track.hosts) {
    const last = lines.at(-1), devices = (last.gpu || []).length, id = key(host, lines), t0 = track.t0 ?? lines[0].time, share = (a, b) => a !== undefined && b ? 100 * a / b : null;
    const data = [lines.map(l => l.time - t0), ...[0, 1, 2].map(i => lines.map(l => (l.cpu || [])[i] ?? null)), lines.map(l => share(l.memory, l.memory_limit)), ...Array.from({length: devices}, (_, d) => lines.map(l => (l.gpu[d] || [])[1] ?? null))];
    const title = `memory ${bytes(last.memory || 0)}` + (last.memory_limit ? ` of ${bytes(last.memory_limit)}` : "") + (Number.isFinite(last.disk_free) ? `, disk free ${bytes(last.disk_free)}` : "") + (last.throttled ? ", throttled" : "");
    const card = [...body.children].find(c => c.dataset.key === id);
    card.querySelector("small").textContent = title;
    if (!hostCharts.has(id)) {
      const percent = (u, v) => v === null ? "–" : v.toFixed(0) + " %", c = color("c0"), points = {show: (u, s) => u.data[s].length < 20, size: 5};
      const series = [{label: "time", value: (u, v) => clock(v)}, {label: "CPU p5", stroke: c + "60", value: percent, width: 1, points}, {label: "median", stroke: c, value: percent, width: 1.6, points}, {label: "p95", stroke: c + "60", value: percent, width: 1, points}, {label: "memory", stroke: color("c3"), value: percent, width: 1.6, points},
        ...Array.from({length: devices}, (_, d) => ({label: "GPU " + d, stroke: color("c" + (d + 1) % 8), value: percent, width: 1.6, points}))];
      const made = options(series, {key: "hosts", time: true, value: v => v + " %", y: {range: (u, a, b) => [0, Math.max(100, Math.ceil(b / 50) * 50)]}}, width(card));
      hostCharts.set(id, new uPlot({...made, bands: [{series: [3, 1], fill: c + "20"}]}, data, card));
    } else hostCharts.get(id).setData(data);
    latest(hostCharts.get(id));
  }
  for (const old of [...body.children]) if (!hostCharts.has(old.dataset.key)) old.remove();
}
async function logs(fresh) {
  const run = picked[0], section = $("logs"), box = section.querySelector("pre"), select = section.querySelector("select");
  section.hidden = !run;
  if (!run || document.hidden) return;
  try {
    const answer = await fetch(`runs/${encodeURIComponent(run)}/logs` + (fresh || !select.value ? "" : "?file=" + encodeURIComponent(select.value))), found = await answer.json();
    if (run !== picked[0]) return;
    if (select.options.length !== found.files.length || fresh) select.replaceChildren(...found.files.map(f => { const o = el("option", "", f.replace(/^rank-(\d+)\.log$/, "rank $1")); o.value = f; return o; }));
    select.value = found.file; select.hidden = !found.files.length;
    section.querySelector("small").textContent = (picked.length > 1 ? "of " + nick(run) : "") + (found.cut ? " the last 32 KiB" : "");
    const bottom = box.scrollTop + box.clientHeight >= box.scrollHeight - 20, text = found.text || (found.files.length ? "This rank has printed nothing." : "No logs. ronde run keeps what each rank prints.");
    box.classList.toggle("empty", !found.text);
    if (box.textContent !== text) { box.textContent = text; if (bottom || fresh) box.scrollTop = box.scrollHeight; }
  } catch { /* the server is away */ }
}

const asked = new URLSearchParams(location.hash.slice(1));
if (location.search) history.replaceState(null, "", location.pathname + location.hash); // the key is in the cookie now
if (AXES.includes(asked.get("x"))) axis = asked.get("x");
$("log").checked = asked.get("log") === "1"; $("smooth").checked = asked.get("smooth") === "1";
$("axis").replaceChildren(...AXES.map(name => { const b = el("button", "", name); b.setAttribute("aria-pressed", name === axis); b.onclick = () => { axis = name; for (const other of $("axis").children) other.setAttribute("aria-pressed", other === b); pick(picked); }; return b; }));
$("log").onchange = $("smooth").onchange = () => pick(picked);
$("filter").oninput = table;
$("logs").querySelector("select").onchange = () => logs(false);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { rebuild(); showJob(); });
let resized = 0;
new ResizeObserver(() => { clearTimeout(resized); resized = setTimeout(() => { for (const c of [...charts.values(), ...hostCharts.values(), ...scatters]) c.setSize({width: width(c.root.parentElement), height: 230}); heat(); }, 120); }).observe($("charts"));
async function begin() {
  opened = asked.get("job") || "";
  await list(); await loadJob();
  const known = asked.getAll("run").filter(rowOf).slice(0, MOST_RUNS);
  begun = true;
  if (known.length) pick(known); else if (opened) await openJob(opened); else if (rows.length) pick([rows[0].name]);
  if (!picked.length) draw();
}
begin();
setInterval(() => { if (!document.hidden) { list(); loadJob(); } }, 3000);
setInterval(() => logs(false), 3000);
document.addEventListener("visibilitychange", () => { if (!document.hidden) { list(); loadJob(); logs(false); } });
