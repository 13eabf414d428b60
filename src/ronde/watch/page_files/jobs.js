// Searches, flows, and maps: their list, and the one that is opened. All text is set with textContent only.
"use strict";
const GOOD = ["done", "kept"], scatters = [];
let jobs = [], opened = "", job = null, jobText = "", goalLog = false;

const ratio = (part, of) => { const bar = el("progress", ""); bar.max = of || 1; bar.value = Math.min(part, of); return of ? bar : null; };
const several = (n, noun) => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`;
const goalName = view => view.goal.replace(/^(max|min):/, "");
function link(text, go) { const b = el("button", "link", text); b.onclick = click => { click.stopPropagation(); go(); }; return b; }
function progress(view) {
  if (view.status === "unreadable") return ["–"];
  if (view.kind === "search") return [view.status === "running" ? ratio(view.samples, view.whole) : null, several(view.total, "trial") + (view.running ? `, ${view.running} running` : "")];
  return [ratio(view.done, view.total), `${whole(view.done)} of ${several(view.total, view.kind === "flow" ? "step" : "item")}`];
}
function outcome(view) {
  if (view.status === "unreadable") return view.why;
  if (view.kind === "search") return view.best ? `${goalName(view)} ${number(view.result)} · ${nick(view.best)}` : "–";
  return view.failed ? `${whole(view.failed)} failed` : "–";
}
function jobTable() {
  $("jobs").hidden = !jobs.length; $("runs").hidden = !rows.length && jobs.length > 0;
  const body = el("tbody"), head = el("tr", "", ...["name", "kind", "status", "progress", "result", "written"].map(name => { const cell = el("th", "", name); cell.scope = "col"; return cell; }));
  for (const view of jobs) {
    const line = el("tr", view.name === opened ? "on" : "", el("td", "cut", link(view.name, () => openJob(view.name))), el("td", "", view.kind), el("td", "", el("span", "status " + view.status, view.status)), el("td", "", ...progress(view)), el("td", view.failed ? "cut bad" : "cut", outcome(view)), el("td", "", view.written ? ago(view.written) : "–"));
    line.onclick = () => openJob(view.name);
    body.append(line);
  }
  $("jobs").querySelector("small").textContent = jobs.length || "";
  $("jobs").querySelector(".wide").replaceChildren(el("table", "", el("thead", "", head), body));
}
async function openJob(name) {
  opened = name; job = null; jobText = "";
  jobTable(); remember(); await loadJob();
  const first = job?.best || job?.runs[0]?.name, inside = job?.runs.some(r => picked.includes(r.name));
  if (first && !inside) pick([first]);
}
async function loadJob() {
  const name = opened;
  if (!name) return showJob();
  try {
    const answer = await fetch("jobs/" + name.split("/").map(encodeURIComponent).join("/")), text = await answer.text();
    if (name !== opened || text === jobText) return;
    jobText = text; job = answer.ok ? JSON.parse(text) : {name, kind: "", status: "unreadable", why: text, runs: []};
    showJob(); table(); about();
  } catch { /* the stream says that the server is away */ }
}
function showJob() {
  const section = $("job"), wide = section.querySelector(".wide"), at = wide ? [wide.scrollTop, wide.scrollLeft] : [0, 0];
  scatters.splice(0).forEach(u => u.destroy());
  section.hidden = !job;
  if (!job) return section.replaceChildren();
  const close = el("button", "more close", "Close");
  close.onclick = () => { opened = ""; job = null; jobText = ""; showJob(); jobTable(); remember(); };
  const title = el("div", "title", el("h1", "", nick(job.name)), el("span", "status " + job.status, job.status), nick(job.name) === job.name ? null : el("span", "soft", job.name), close);
  section.replaceChildren(title, ...({search: showSearch, flow: showFlow, map: showMap}[job.kind] || (() => []))(job), ...(job.why && job.kind !== "search" ? [el("p", "error", job.why)] : []));
  section.querySelector(".wide")?.scrollTo(at[1], at[0]);
  for (const box of section.querySelectorAll(".card[data-name]")) scatter(box, job);
  paint();
}
const factOf = (name, value, remark) => el("div", "", el("dt", "", name), el("dd", "", value, remark ? el("small", "", remark) : null));
const rung = trial => trial.results.length - 1;
const parameters = view => [...new Set(view.trials.flatMap(t => Object.keys(t.values)))];
function openRun(name) { pick([name]); $("about").scrollIntoView({behavior: "smooth"}); }

function showSearch(view) {
  const best = view.trials.find(t => t.run === view.best), names = parameters(view), sign = view.goal.startsWith("max") ? -1 : 1;
  const facts = el("dl", "facts"), at = r => view.rungs[r] < 1e15 ? whole(view.rungs[r]) + " samples" : "the whole training", ends = {target: "the target is reached", budget: "the budget is used up", stopped: "asked to stop"};
  facts.append(factOf("best " + goalName(view), number(view.result ?? undefined), best ? `${nick(best.run)}, after ${at(rung(best))}` : "no result yet"),
    factOf("trials", whole(view.total), [view.running && view.running + " running", view.failed && view.failed + " failed", ends[view.why]].filter(Boolean).join(", ")),
    factOf("trained", whole(view.samples), view.whole ? `samples, ${(100 * view.samples / view.whole).toFixed(view.samples < .1 * view.whole ? 1 : 0)} % of all trials in full` : "samples"),
    factOf("method", view.plan.method, view.rungs.length > 1 ? "rungs: " + view.rungs.map(whole).join(", ") + " samples" : ""));
  if (best) for (const [name, value] of Object.entries(best.values).slice(0, 3)) facts.append(factOf(name, typeof value === "number" ? number(value) : String(value), "of the best trial"));
  const rungs = view.rungs.length > 1, head = el("tr", "", ...["trial", "state", goalName(view), ...(rungs ? ["rung"] : []), "samples", ...names].map((name, i) => { const cell = el("th", i > 1 && (i < 5 || numeric(view, name)) ? "number" : "", name); cell.scope = "col"; return cell; })), body = el("tbody");
  const order = (a, b) => b.results.length - a.results.length || (a.results.length ? sign * (a.results.at(-1) - b.results.at(-1)) : 0) || a.trial - b.trial;
  for (const trial of [...view.trials].sort(order)) {
    const live = view.runs.find(r => r.name === trial.run), line = el("tr", "", el("td", "cut", live ? pickBox(trial.run) : null, nick(trial.run), trial.run === view.best ? el("span", "best", "best") : null));
    const state = el("span", "status " + trial.state, trial.state); if (trial.error) state.title = trial.error;
    line.append(el("td", "", state), el("td", "number", trial.results.length ? number(trial.results.at(-1)) : "–"));
    if (rungs) line.append(el("td", "number", trial.results.length ? `${trial.results.length} of ${view.rungs.length}` : "–"));
    line.append(el("td", "number", whole(Math.max(trial.samples, live?.samples || 0))), ...names.map(n => { const v = trial.values[n], cell = el("td", numeric(view, n) ? "number" : "cut", v === undefined ? "–" : typeof v === "number" ? number(v) : String(v)); cell.title = String(v ?? ""); return cell; }));
    if (live) line.dataset.name = trial.run;
    if (live) line.onclick = () => openRun(trial.run); else line.className += " idle";
    body.append(line);
  }
  const cards = names.map(name => { const card = el("div", "card", el("h3", "", `${goalName(view)} by ${name}`, el("small", "", view.log.includes(name) ? "log scale" : ""))); card.dataset.name = name; return card; });
  const box = el("input"); box.type = "checkbox"; box.checked = goalLog; box.onchange = () => { goalLog = box.checked; showJob(); };
  const some = view.trials.some(t => t.results.length);
  return [el("p", "command", view.plan.command.join(" ") + "  " + view.plan.space.map(s => "--space " + s).join(" ")), facts, el("div", "bar", el("h2", "", "Trials"), el("label", "soft", box, " " + goalName(view) + " on a log scale")), el("div", "wide", el("table", "", el("thead", "", head), body)),
    some ? el("div", "grid scatters", ...cards) : el("p", "empty", "No trial has a result yet.")];
}
const numeric = (view, name) => view.trials.every(t => t.values[name] === undefined || typeof t.values[name] === "number");
function scatter(card, view) {
  const name = card.dataset.name, all = view.trials.filter(t => t.results.length && t.values[name] !== undefined && Number.isFinite(t.results.at(-1)) && (!goalLog || t.results.at(-1) > 0)), isNumber = numeric(view, name);
  const choices = isNumber ? [] : [...new Set(all.map(t => String(t.values[name])))].sort(), place = t => isNumber ? t.values[name] : choices.indexOf(String(t.values[name]));
  const sorted = all.sort((a, b) => place(a) - place(b)), ys = sorted.map(t => t.results.at(-1)), blue = color("c0"), good = color("good"), count = Math.max(1, view.rungs.length);
  const series = [{label: name}], data = [sorted.map(place)], dots = (label, stroke, fill, size, test) => { series.push({label, stroke, paths: () => null, points: {show: true, size, stroke, fill, width: 1.5}}); data.push(sorted.map((t, i) => test(t) ? ys[i] : null)); };
  for (let r = 0; r < count; r++) dots(count > 1 ? "rung " + (r + 1) : goalName(view), blue, blue + ["30", "70", "c0"][Math.max(0, 2 - (count - 1 - r))], 8, t => rung(t) === r && t.run !== view.best);
  dots("best", good, good, 12, t => t.run === view.best);
  const pad = (u, low, high) => { const by = (high - low) * .06 || Math.abs(low) * .1 || 1; return [low - by, high + by]; }, log = view.log.includes(name);
  const made = options(series, {key: "scatter", x: isNumber ? log ? {distr: 3} : {range: pad} : {range: [-.5, choices.length - .5]}, y: goalLog ? {distr: 3} : {range: pad}}, width(card));
  if (!isNumber) Object.assign(made.axes[0], {splits: choices.map((_, i) => i), values: () => choices.map(c => c.length > 14 ? c.slice(0, 13) + "…" : c)});
  const u = new uPlot({...made, legend: {live: false, markers: {width: 1.5, stroke: (u, i) => u.series[i].points.stroke(u, i), fill: (u, i) => u.series[i].points.fill(u, i)}}, cursor: {drag: {x: false, y: false, click: () => {}}, points: {show: false}, x: false, y: false}}, data, card), under = el("p", "under", sorted.length ? "" : "No finite result.");
  card.append(under); scatters.push(u);
  const nearest = move => {
    const box = u.over.getBoundingClientRect(), x = move.clientX - box.left, y = move.clientY - box.top, far = i => Math.hypot(u.valToPos(data[0][i], "x") - x, u.valToPos(ys[i], "y") - y);
    let found = -1; ys.forEach((_, i) => { if (far(i) < 24 && (found < 0 || far(i) < far(found))) found = i; });
    return sorted[found];
  };
  u.over.onpointermove = move => { const t = nearest(move); u.over.style.cursor = t ? "pointer" : ""; under.textContent = t ? [nick(t.run), `${name} ${isNumber ? number(t.values[name]) : t.values[name]}`, `${goalName(view)} ${number(t.results.at(-1))}`].join("  ·  ") : ""; };
  u.over.onpointerleave = () => { under.textContent = ""; };
  u.over.onclick = click => { const t = nearest(click); if (t) openRun(t.run); };
}
function showFlow(view) {
  const head = el("tr", "", ...["step", "state", "time", "tries", "after", "why", "result"].map(name => { const cell = el("th", name === "time" || name === "tries" ? "number" : "", name); cell.scope = "col"; return cell; })), body = el("tbody");
  for (const step of view.steps) {
    const values = Object.entries(step.values).slice(0, 2).map(([k, v]) => `${k} ${number(v)}`).join(" · "), why = step.why || (step.state === "kept" ? "nothing has changed" : step.reason);
    const opens = step.opens ? () => openJob(step.opens) : step.opens_run ? () => openRun(step.opens_run) : null, name = el("td", "", opens ? link(step.name, opens) : step.name, el("small", "command", step.run)), reason = el("td", "why", why || "–"); name.title = step.run;
    const line = el("tr", "", name, el("td", "", el("span", "status " + step.state, step.state)), el("td", "number", Number.isFinite(step.seconds) ? clock(step.seconds) : "–"), el("td", "number", step.tries || "–"), el("td", "cut", step.needs.join(", ") || "–"), reason, el("td", "cut", values || "–"));
    if (step.opens_run) line.dataset.name = step.opens_run;
    body.append(line);
  }
  return [el("p", "soft", `${view.done} of ${several(view.total, "step")} done, kept, or skipped`), el("div", "wide tall", el("table", "steps", el("thead", "", head), body))];
}
function showMap(view) {
  const told = [el("p", "command", view.command), el("p", "soft", ratio(view.done, view.total), ` ${whole(view.done)} of ${several(view.total, "item")}` + (view.failed ? `, ${whole(view.failed)} of them failed` : ""))];
  if (!view.items.length) return told;
  const body = el("tbody", "", ...view.items.map(item => el("tr", "", el("td", "", item.item || "item " + whole(item.place)), el("td", "number", whole(item.attempts)), el("td", "", el("pre", "", item.error)))));
  return [...told, el("div", "wide tall", el("table", "", el("thead", "", el("tr", "", el("th", "", "failed item"), el("th", "number", "attempts"), el("th", "", "error"))), body))];
}
