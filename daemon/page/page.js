"use strict";
// The page of ckptd. It shows what `/api/...` of its own server says, and changes nothing.
// Every text from a job, a tag, a key or a metric becomes a text node and never markup.

// -- elements

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** Return a new element. `attributes` whose value is null, undefined or false are left out. */
function el(name, attributes, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svg(name, attributes, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

/** Make `old` look like `fresh`, and keep its nodes where they agree: focus and selection stay. */
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of [...fresh.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.nodeName === "INPUT") return;  // what the reader has typed stays
  if (old.nodeName === "SELECT") {
    const { value } = fresh;
    if (old.textContent !== fresh.textContent) old.replaceChildren(...fresh.childNodes);
    if (old.value !== value) old.value = value;
    return;
  }
  const theirs = [...fresh.childNodes];
  [...old.childNodes].forEach((child, at) => {
    if (at < theirs.length) morph(child, theirs[at]);
    else child.remove();
  });
  old.append(...theirs.slice(old.childNodes.length));
}

/** Show these nodes in a container, in place of what is there. */
function show(container, ...nodes) {
  const fresh = container.cloneNode(false);
  fresh.append(...nodes.flat(Infinity).filter(Boolean));
  morph(container, fresh);
  for (const bar of container.querySelectorAll("[data-share]")) {
    bar.style.width = `${bar.dataset.share}%`;
  }
}

// -- words

const known = (value) => value !== null && value !== undefined;
const grouped = new Intl.NumberFormat("en");

function count(value) {
  return known(value) ? grouped.format(value) : "–";
}

function size(bytes) {
  if (!known(bytes)) return "–";
  let unit = 0;
  while (bytes >= 999.5 && unit < 4) {
    bytes /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || bytes >= 99.5 ? 0 : 1;
  return `${bytes.toFixed(digits)} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

function span(seconds) {
  if (!known(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  if (hours === 0) return `${minutes} min`;
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return `${Math.floor(hours / 24)} d`;
}

/** Word a time that something took, with three digits that count. */
function took(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  return seconds < 100 ? `${Number(seconds.toPrecision(3))} s` : span(seconds);
}

function number(value) {
  if (!known(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return grouped.format(value);
  return Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

/** Return the Unix time by the clock of the node, which may differ from the browser's. */
function now() {
  if (!state.live) return Date.now() / 1000;
  return state.live.now + (performance.now() - state.received) / 1000;
}

function pad(value) {
  return String(value).padStart(2, "0");
}

function clock(time, withSeconds = true) {
  const at = new Date(time * 1000);
  return `${pad(at.getHours())}:${pad(at.getMinutes())}${withSeconds ? `:${pad(at.getSeconds())}` : ""}`;
}

function day(time) {
  const at = new Date(time * 1000);
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
}

function moment(time) {
  if (!known(time)) return "–";
  return day(time) === day(now()) ? clock(time) : `${day(time)} ${clock(time, false)}`;
}

const ago = (seconds) => (known(seconds) ? `${span(seconds)} ago` : "");
const shape = (sizes) => (sizes.length ? sizes.join(" × ") : "scalar");
const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

// -- the server

/** Return what the server answers. Raises Error with its sentence. */
async function ask(path, query, signal) {
  const text = new URLSearchParams(query).toString();
  let answer;
  try {
    answer = await fetch(text ? `${path}?${text}` : path, { signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The page's own server, ckptd page, does not answer.");
  }
  if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
  return answer.json();
}

const trouble = (error) => el("p", { class: "trouble", role: "alert" }, error.message);

const state = {
  live: null, received: 0, connected: false, opened: performance.now(),
  history: null, historyError: null, historyMark: null, historyBusy: false,
  range: 6 * 3600, job: "", shown: 50,
  jobs: [], listing: null, listingError: null, sort: "newest", down: true, listed: 100,
  details: null, detailsError: null, filter: "", tensorsShown: 100, measured: null, measuring: null,
  level: "all",
};

function connect() {
  const source = new EventSource("/api/live");
  source.onmessage = (message) => {
    state.live = JSON.parse(message.data);
    state.received = performance.now();
    state.connected = true;
    tell();
    if (state.live.history_mark !== state.historyMark) loadHistory();
  };
  source.onerror = () => {
    state.connected = false;
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 5000);
  };
}

/** Show what is live. */
function tell() {
  const { live } = state;
  const lost = (performance.now() - (state.received || state.opened)) / 1000;
  const status = live && live.status;
  $("live").toggleAttribute("data-on", state.connected && lost < 5);
  const words = state.connected && lost < 5 ? `live, ${clock(now())}` : "not connected";
  morph($("live"), filled($("live").cloneNode(false), {}, [words]));
  if (status) {
    morph($("root"), filled($("root").cloneNode(false), {}, [status.root]));
    document.title = `${live.level === "well" ? "" : "! "}ckptd ${status.root}`;
  }
  const cut = lost > 5;
  const level = cut || !live ? "silent" : live.level;
  const text = cut
    ? `The page's own server, ckptd page, has not answered for ${span(lost)}. What is shown is from then.`
    : live ? live.text : "Connecting.";
  const problems = live && live.problems.length > 1
    ? el("ul", {}, live.problems.map((one) => el("li", {}, one.message))) : null;
  const fresh = el("div", { id: "verdict", class: "verdict", "data-level": level, role: "status" },
    el("p", {}, text), problems);
  morph($("verdict"), fresh);
  if (route().view === "overview") overview();
}

// -- overview

function overview() {
  const status = state.live && state.live.status;
  const view = $("view-overview");
  if (!status) {
    show(view, el("p", { class: "empty" }, state.live
      ? "Nothing is known about the daemon. The checkpoints and the history of the root can be looked at all the same."
      : "The first answer of the daemon is on its way."));
    return;
  }
  const jobs = status.jobs;
  const old = state.live.level === "silent";
  show(view,
    old ? el("p", { class: "old" }, `Last known at ${moment(state.live.now - state.live.age_seconds)}:`) : null,
    el("div", { class: "tiles" }, tiles(status, jobs)),
    el("h2", {}, "Jobs"),
    jobs.length ? sheet(el("table", { class: "cards" },
      head(["Job", "Ranks:n", "Newest durable", "In memory", "Saving", "Room:n", "Last error"]),
      el("tbody", {}, jobs.map(jobRow))))
      : el("p", { class: "empty" }, "No job has saved anything here yet. A training that calls ckptd.snapshot() appears by itself."),
    status.jobs_not_shown ? el("p", { class: "quiet" }, `${count(status.jobs_not_shown)} more jobs are not shown.`) : null,
    ranks(jobs),
    el("h2", {}, "Daemon"), facts(daemonFacts(status)));
}

/** Word the ranks of all jobs on this node with their slots in memory. */
function ranks(jobs) {
  const all = jobs.flatMap((job) => (job.ranks || []).map((rank) => ({ job: job.job, ...rank })));
  if (!all.length) return null;
  const slots = all.flatMap((rank) => rank.slots);
  const states = [...new Set(slots.map((slot) => slot.state))].sort();
  const counted = states.map((state) => `${count(slots.filter((slot) => slot.state === state).length)} ${state}`);
  const left = jobs.reduce((sum, job) => sum + (job.ranks_not_shown || 0), 0);
  const open = $("ranks") && $("ranks").open;
  return el("details", { id: "ranks", open },
    el("summary", {}, "Ranks and slots"),
    el("p", { class: "quiet" }, `${plural(all.length, "rank")} with ${plural(slots.length, "slot")}${counted.length ? `: ${counted.join(", ")}` : ""}${left ? `, and ${plural(left, "rank")} that the report leaves out` : ""}.`),
    open ? sheet(el("table", { class: "cards" }, head(["Rank", "Job", "Process", "Slots"]), el("tbody", {}, all.map(rankRow)))) : null);
}

function rankRow(rank) {
  return el("tr", {},
    el("th", { scope: "row", "data-label": "Rank" }, el("span", {}, count(rank.rank))),
    cell("Job", rank.job, "name"),
    cell("Process", known(rank.pid) ? `pid ${rank.pid}${rank.connected ? "" : ", not connected"}` : "not known"),
    cell("Slots", rank.slots.length
      ? rank.slots.map((slot) => `${slot.state}${known(slot.step) ? ` step ${count(slot.step)}` : ""}, ${size(slot.bytes)}`).join("; ") : "none", "wrap"));
}

function tiles(status, jobs) {
  const running = jobs.filter((job) => job.ranks_connected);
  const looked = running.length ? running : jobs;
  const durable = looked.filter((job) => job.last_durable && known(job.last_durable.age_seconds))
    .sort((a, b) => b.last_durable.age_seconds - a.last_durable.age_seconds);
  const last = running.length ? durable[0] : durable[durable.length - 1];
  const saving = jobs.flatMap((job) => (job.saving || []).map((one) => ({ job: job.job, ...one })));
  const rate = saving.reduce((sum, one) => sum + (one.bytes_per_second || 0), 0);
  const waiting = jobs.reduce((sum, job) => sum + job.pending.length, 0);
  const room = looked.filter((job) => known(job.room_for)).sort((a, b) => a.room_for - b.room_for)[0];
  const memory = status.shared_memory;
  const counters = status.counters;
  return [
    tile(durable.length > 1 && running.length > 1 ? "Longest since a checkpoint" : "Newest checkpoint",
      last ? ago(last.last_durable.age_seconds) : "none yet",
      last ? `step ${count(last.last_durable.step)} of ${last.job}` : "nothing is durable yet"),
    tile("Saving", saving.length ? (rate ? `${size(rate)}/s` : "begins") : "idle",
      saving.length ? saving.slice(0, 2).map((one) => `${one.job}: ${progress(one)}`).join(", ")
        : waiting ? `${plural(waiting, "snapshot")} waiting` : "nothing waits to be saved"),
    tile("Room", room ? `${count(room.room_for)} more` : known(status.disk_free_bytes) ? size(status.disk_free_bytes) : "–",
      room ? `checkpoints of ${room.job} fit, ${size(status.disk_free_bytes)} free`
        : known(status.disk_free_bytes) ? "free under the root" : "the storage does not tell"),
    tile("Shared memory", size(memory.used_bytes), `of ${size(memory.quota_bytes)}, in ${plural(memory.segments, "slot segment")}`,
      memory.quota_bytes ? memory.used_bytes / memory.quota_bytes : 0),
    tile("Snapshots", `${count(counters.persisted)} saved`,
      `${count(counters.failed)} failed, ${count(counters.skipped)} skipped since the start`),
  ];
}

function tile(title, figure, note, share) {
  return el("div", { class: "tile" }, el("h3", {}, title), el("p", { class: "figure" }, figure),
    known(share) ? meter(share, title) : null, el("p", { class: "note" }, note));
}

function meter(share, label) {
  const percent = Math.round(Math.min(1, Math.max(0, share)) * 100);
  return el("span", { class: "meter", role: "meter", "aria-label": label, "aria-valuenow": percent, "aria-valuemin": 0, "aria-valuemax": 100 },
    el("i", { "data-share": percent }));
}

function progress(one) {
  const done = `${Math.floor((100 * one.done_bytes) / Math.max(one.total_bytes, 1))} %`;
  return known(one.seconds_left) ? `${done}, ${span(one.seconds_left)} left` : done;
}

/** Word the newest step that is in the memory of other nodes too, and why there are no more copies. */
function copied(job) {
  const newest = known(job.replicated) ? `, step ${count(job.replicated)} in the memory of other nodes, too` : "";
  const why = job.replicas_off ? `, no more copies: ${job.replicas_off}` : "";
  return newest + why ? el("span", { class: "quiet" }, newest + why) : null;
}

function jobRow(job) {
  const durable = job.last_durable, sealed = job.last_sealed, error = job.last_error;
  const saving = job.saving || [];
  const waits = job.pending.length - saving.length;
  return el("tr", {},
    el("th", { scope: "row", class: "name" }, el("span", {},
      el("a", { href: `#checkpoints/${encodeURIComponent(job.job)}` }, job.job), " ",
      el("span", { class: "quiet" }, `attempt ${job.attempt}`))),
    cell("Ranks", job.ranks_connected ? count(job.ranks_connected) : "not running", "n"),
    cell("Newest durable", durable ? [`step ${count(durable.step)}`, " ", el("span", { class: "quiet" }, ago(durable.age_seconds))] : "none"),
    cell("In memory", [sealed ? `step ${count(sealed.step)}` : "none", copied(job)], "wrap"),
    cell("Saving", saving.length
      ? saving.map((one) => el("span", {}, progress(one), known(one.bytes_per_second) ? `, ${size(one.bytes_per_second)}/s` : "",
        meter(one.done_bytes / Math.max(one.total_bytes, 1), `${one.tag} saved`)))
      : waits > 0 ? `${count(waits)} waiting` : el("span", { class: "quiet" }, "idle")),
    cell("Room", known(job.room_for) ? count(job.room_for) : "–", "n"),
    cell("Last error", error ? [el("span", { class: "quiet" }, `${known(error.step) ? `step ${count(error.step)}, ` : ""}${ago(error.age_seconds)}: `), error.reason]
      : el("span", { class: "quiet" }, "none"), "wrap"));
}

function daemonFacts(status) {
  const stage = status.stage;
  return [
    ["Version", `${status.version}, pid ${status.pid}`],
    ["Up for", span(status.uptime_seconds)],
    ["Root", status.root],
    ["Free disk", known(status.disk_free_bytes) ? size(status.disk_free_bytes) : "not known"],
    ["Socket", status.socket],
    ["Clients", `${count(status.descriptors.clients)} connected, ${count(status.descriptors.clients_fit)} fit`],
    ["Event loop", `${took(status.event_loop_lag_seconds)} late`],
    ["Memory", known(status.rss_bytes) ? size(status.rss_bytes) : "not known"],
    ["Written", `${size(status.counters.persist_stored_bytes)} for ${size(status.counters.persist_raw_bytes)} of state`],
    ["Log", status.log_file || "standard error"],
    stage ? ["Stage", `${stage.directory}: ${stage.waiting ? `${plural(stage.waiting, "checkpoint")} not uploaded yet` : "everything is uploaded"}`] : null,
  ].filter(Boolean);
}

function facts(pairs) {
  return el("div", { class: "sheet" }, el("dl", { class: "facts" },
    pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
}

const sheet = (table) => el("div", { class: "sheet" }, table);

function head(titles) {
  return el("thead", {}, el("tr", {}, titles.map((title) => {
    const [text, kind] = title.split(":");
    return el("th", { scope: "col", class: kind }, text);
  })));
}

function cell(label, content, kind) {
  return el("td", { "data-label": label, class: kind }, el("span", {}, content));
}

// -- history

async function loadHistory() {
  if (state.historyBusy) return;
  state.historyBusy = true;
  const mark = state.live ? state.live.history_mark : null, { range } = state;
  let found = null, failure = null;
  try {
    found = await ask("/api/history", { since: range ? Math.max(0, Math.floor(now() - range)) : 0 });
  } catch (error) {
    failure = error;
  }
  if (range !== state.range) return;  // the answer for the other range is on its way
  if (found) state.history = found;
  state.historyError = failure;
  state.historyMark = mark;
  if (route().view === "timeline") timeline();
  if (route().view === "events") events();
  setTimeout(() => { state.historyBusy = false; }, 2000);
}

const RANGES = [[3600, "1 hour"], [6 * 3600, "6 hours"], [24 * 3600, "24 hours"], [7 * 86400, "7 days"], [30 * 86400, "30 days"], [0, "all"]];

function timeline() {
  const view = $("view-timeline");
  const all = state.history ? state.history.snapshots : [];
  const jobs = [...new Set(all.map((one) => one.job))].sort();
  const chosen = all.filter((one) => !state.job || one.job === state.job);
  const controls = el("div", { class: "controls" },
    el("label", {}, "Last", el("select", { name: "range" }, RANGES.map(([seconds, text]) =>
      el("option", { value: seconds, selected: seconds === state.range }, text)))),
    el("label", {}, "Job", el("select", { name: "only" }, el("option", { value: "" }, "all jobs"),
      jobs.map((job) => el("option", { value: job, selected: job === state.job }, job)))),
    el("span", { class: "quiet" }, state.history ? plural(chosen.length, "snapshot") : ""));
  if (state.historyError) {
    show(view, controls, trouble(state.historyError));
    return;
  }
  if (!chosen.length) {
    show(view, controls, el("p", { class: "empty" }, state.history
      ? state.history.note || "No snapshot was saved, failed or deleted in this time. Choose a longer one." : "The history is being read."));
    return;
  }
  const width = Math.max(280, Math.min(1180, view.clientWidth || 800));
  const end = now();
  const first = Math.min(...chosen.map((one) => one.sealed || one.durable || one.failed || one.deleted));
  const from = Math.max(state.range ? end - state.range : first, first - Math.max(10, (end - first) * 0.03));
  const plotWidth = width > 760 ? (width - 24) / 3 : width;
  show(view, controls,
    state.history.truncated ? el("p", { class: "quiet" }, "Only the newest 3,000 snapshots are shown.") : null,
    lanes(chosen, from, end, width),
    el("div", { class: "plots" },
      plot("durable", "Until durable", chosen, from, end, plotWidth, [["durable_seconds", "dot"]], took),
      plot("held", "Training held", chosen, from, end, plotWidth, [["held_seconds", "dot"]], took),
      plot("size", "Size", chosen, from, end, plotWidth, [["bytes", "dot"], ["written_bytes", "dot2", "written"]], size)),
    el("h2", {}, "Snapshots"),
    sheet(el("table", { class: "cards" },
      head(["Step", "Job", "When", "Held:n", "Durable after:n", "Size:n", "Written:n", "State"]),
      el("tbody", {}, [...chosen].reverse().slice(0, state.shown).map(snapshotRow)))),
    chosen.length > state.shown ? el("p", { class: "more" }, el("button", { class: "act", "data-more": "shown" }, `Show more of ${count(chosen.length)}`)) : null);
}

function stateOf(one) {
  if (one.deleted) return ["deleted", moment(one.deleted)];
  const deltas = one.delta_chunks ? `${count(one.delta_chunks)} of ${count(one.chunks)} chunks as deltas, chain ${count(one.chain)}` : "";
  if (one.durable) return ["durable", [one.failed ? "after it had failed" : "", deltas].filter(Boolean).join("; ")];
  return ["failed", one.reason || ""];
}

function snapshotRow(one) {
  const [kind, more] = stateOf(one);
  return el("tr", {},
    el("th", { scope: "row", "data-label": "Step" }, el("span", {}, known(one.step) ? count(one.step) : one.tag)),
    cell("Job", one.job, "name"),
    cell("When", moment(one.sealed || one.failed || one.deleted)),
    cell("Held", took(one.held_seconds), "n"), cell("Durable after", took(one.durable_seconds), "n"),
    cell("Size", size(one.bytes), "n"), cell("Written", size(one.written_bytes), "n"),
    cell("State", [el("span", { class: `mark s-${kind}` }, kind), more ? ` ${more}` : ""], "wrap"));
}

// -- charts

function timeTicks(from, to, most) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 1209600];
  const step = steps.find((one) => (to - from) / one <= most) || 2592000;
  const offset = new Date().getTimezoneOffset() * 60;
  const found = [];
  for (let at = Math.ceil((from - offset) / step) * step + offset; at <= to; at += step) {
    found.push([at, step >= 86400 ? day(at).slice(5) : clock(at, step < 60)]);
  }
  return found;
}

function valueTicks(most) {
  const raw = most / 3, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const found = [];
  for (let at = 0; at <= most * 1.0001; at += step) found.push(at);
  return found;
}

function timeAxis(from, to, x, top, bottom, width) {
  return timeTicks(from, to, Math.max(2, Math.floor(width / 90))).map(([at, text]) => [
    svg("line", { class: "grid", x1: x(at), x2: x(at), y1: top, y2: bottom }),
    svg("text", { x: x(at), y: bottom + 14, "text-anchor": "middle" }, text)]);
}

/** Draw the snapshots of each job on a lane: when they were sealed, durable, failed, deleted. */
function lanes(chosen, from, to, width) {
  const jobs = [...new Set(chosen.map((one) => one.job))].slice(-12);
  const lane = 34, left = 8, right = width - 34, bottom = jobs.length * lane + 8;
  const x = (at) => left + ((Math.max(at, from) - from) / (to - from)) * (right - left);
  const marks = [];
  jobs.forEach((job, at) => {
    const y = at * lane + 22;
    marks.push(svg("text", { x: left, y: y - 9 }, job.length > 60 ? `${job.slice(0, 60)}…` : job),
      svg("line", { class: "grid", x1: left, x2: right, y1: y + 9, y2: y + 9 }));
    for (const one of chosen.filter((each) => each.job === job)) {
      if (one.failed && one.failed >= from) marks.push(svg("path", { class: "failed", d: `M${x(one.failed) - 3.5} ${y - 3.5}l7 7m0 -7l-7 7` }));
      if (one.durable && one.durable >= from) {
        const start = x(one.sealed || one.durable), end = Math.max(x(one.durable), start + 3);
        const held = one.sealed && one.held_seconds ? Math.max(1.5, start - x(one.sealed - one.held_seconds)) : 0;
        marks.push(svg("rect", { class: "durable", x: start, y: y - 4, width: end - start, height: 8, rx: 1 }),
          held ? svg("rect", { class: "held", x: start - held, y: y - 4, width: held, height: 8 }) : null);
      }
      if (one.deleted && one.deleted >= from) marks.push(svg("circle", { class: "deleted", cx: x(one.deleted), cy: y + 9, r: 2.5 }));
    }
    const live = state.live && state.live.status && state.live.status.jobs.find((each) => each.job === job);
    if (live && live.pending.length) marks.push(svg("rect", { class: "sealed", x: right + 6, y: y - 4, width: 8, height: 8 }));
  });
  const done = chosen.filter((one) => one.durable).length, failed = chosen.filter((one) => one.failed && !one.durable).length;
  return el("figure", {},
    el("figcaption", {}, el("h3", {}, "Snapshots over time"), legend()),
    svg("svg", { viewBox: `0 0 ${width} ${bottom + 22}`, role: "img", "aria-label": `${plural(done, "snapshot")} became durable and ${count(failed)} failed; the table below lists them` },
      timeAxis(from, to, x, 8, bottom, right), marks));
}

function legend() {
  const sign = (...marks) => svg("svg", { viewBox: "0 0 14 12", "aria-hidden": "true" }, ...marks);
  return el("ul", { class: "legend" },
    el("li", {}, sign(svg("rect", { class: "held", x: 5, y: 2, width: 3, height: 8 })), "held"),
    el("li", {}, sign(svg("rect", { class: "durable", x: 1, y: 2, width: 12, height: 8, rx: 1 })), "sealed until durable"),
    el("li", {}, sign(svg("rect", { class: "sealed", x: 3, y: 2, width: 8, height: 8 })), "in memory only, now"),
    el("li", {}, sign(svg("path", { class: "failed", d: "M3.5 2.5l7 7m0 -7l-7 7" })), "failed"),
    el("li", {}, sign(svg("circle", { class: "deleted", cx: 7, cy: 6, r: 2.5 })), "deleted"));
}

/** Draw values over time. The arrow keys and the pointer choose a snapshot, which is then worded. */
function plot(id, title, chosen, from, to, width, series, word) {
  const points = chosen.filter((one) => one.durable >= from && series.some(([key]) => known(one[key])));
  const height = 150, left = 58, right = width - 34, top = 8, bottom = height - 22;
  const most = Math.max(...points.flatMap((one) => series.map(([key]) => one[key] || 0)), 0);
  const caption = (text) => el("figcaption", {}, el("h3", {}, title), el("output", {}, text));
  if (!points.length || !most) return el("figure", { "data-plot": id }, caption(""), el("p", { class: "empty" }, "Nothing is known for this time."));
  const ticks = valueTicks(most), ceiling = Math.max(most * 1.04, ticks[ticks.length - 1]);
  const x = (at) => left + ((at - from) / (to - from)) * (right - left);
  const y = (value) => bottom - (value / ceiling) * (bottom - top);
  const main = series[0][0];
  const jobs = [...new Set(points.map((one) => one.job))];
  const lines = jobs.map((job) => points.filter((one) => one.job === job && known(one[main]))
    .map((one, at) => `${at ? "L" : "M"}${x(one.durable).toFixed(1)} ${y(one[main]).toFixed(1)}`).join(""));
  const whose = (one) => (jobs.length > 1 ? `${one.job}, ` : "");
  const last = points[points.length - 1];
  plots[id] = { points, x, y, main, word: (one) => `${whose(one)}step ${count(one.step)}: ${series.map(([key, , what]) => `${word(one[key])}${what ? ` ${what}` : ""}`).join(", ")}`, at: points.length - 1, left, right };
  return el("figure", { "data-plot": id }, caption(plots[id].word(last)),
    svg("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": `${title}: the last one ${word(last[main])}, the greatest ${word(most)}. The arrow keys choose a snapshot.` },
      ticks.map((value) => [svg("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }),
        svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, word(value).replace(/^0 (ms|B)$/, "0"))]),
      timeAxis(from, to, x, top, bottom, right),
      lines.map((line) => svg("path", { class: "line", d: line })),
      series.flatMap(([key, kind]) => points.filter((one) => known(one[key])).map((one) =>
        svg("circle", { class: kind, cx: x(one.durable).toFixed(1), cy: y(one[key]).toFixed(1), r: points.length > 300 ? 1.5 : 2.25 }))),
      svg("circle", { class: "chosen", r: 5, visibility: "hidden" })));
}

const plots = {};

function choose(figure, at) {
  const found = plots[figure.dataset.plot];
  if (!found) return;
  found.at = Math.max(0, Math.min(found.points.length - 1, at));
  const one = found.points[found.at], ring = figure.querySelector(".chosen");
  ring.setAttribute("cx", found.x(one.durable));
  ring.setAttribute("cy", found.y(one[found.main] || 0));
  ring.removeAttribute("visibility");
  figure.querySelector("output").textContent = found.word(one);
}

document.addEventListener("pointermove", (event) => {
  const figure = event.target.closest && event.target.closest("[data-plot]");
  const found = figure && plots[figure.dataset.plot], drawing = figure && figure.querySelector("svg");
  if (!found || !drawing) return;
  const box = drawing.getBoundingClientRect();
  const place = ((event.clientX - box.left) / box.width) * drawing.viewBox.baseVal.width;
  let best = 0;
  found.points.forEach((one, at) => {
    if (Math.abs(found.x(one.durable) - place) < Math.abs(found.x(found.points[best].durable) - place)) best = at;
  });
  choose(figure, best);
});

document.addEventListener("keydown", (event) => {
  const figure = event.target.closest && event.target.closest("[data-plot]");
  const found = figure && plots[figure.dataset.plot];
  const to = found && { ArrowLeft: found.at - 1, ArrowRight: found.at + 1, Home: 0, End: found.points.length - 1 }[event.key];
  if (known(to) && to !== false) {
    event.preventDefault();
    choose(figure, to);
  }
});

// -- checkpoints

async function loadCheckpoints(job, tag) {
  const view = $("view-checkpoints"), asked = location.hash;
  const left = () => location.hash !== asked;  // what is there now has asked for itself
  let found = null, failure = null;
  if (tag) {
    if (state.details && state.details.job === job && state.details.tag === tag) return checkpoint();
    Object.assign(state, { details: null, detailsError: null, filter: "", tensorsShown: 100, measured: null });
    show(view, el("p", { class: "empty" }, "The checkpoint is being read."));
    try {
      found = await ask("/api/checkpoint", { job, tag });
    } catch (error) {
      failure = error;
    }
    if (left()) return undefined;
    Object.assign(state, { details: found, detailsError: failure });
    return checkpoint();
  }
  state.details = null;
  if (!state.listing) show(view, el("p", { class: "empty" }, "The checkpoints are being read."));
  try {
    const jobs = await ask("/api/jobs");
    if (left()) return undefined;
    state.jobs = jobs;
    const wanted = job || (state.listing && jobs.includes(state.listing.job) ? state.listing.job : jobs[0]);
    found = wanted ? await ask("/api/checkpoints", { job: wanted }) : null;
  } catch (error) {
    failure = error;
  }
  if (left()) return undefined;
  if (!failure) state.listing = found;
  state.listingError = failure;
  return checkpoints();
}

function checkpoints() {
  const view = $("view-checkpoints"), { listing } = state;
  const controls = el("div", { class: "controls" }, state.jobs.length
    ? el("label", {}, "Job", el("select", { name: "job" }, state.jobs.map((job) =>
      el("option", { value: job, selected: listing && job === listing.job }, job)))) : null,
  el("button", { class: "act", "data-act": "reload" }, "Read again"));
  if (state.listingError) return show(view, controls, trouble(state.listingError));
  if (!listing || !listing.checkpoints.length) {
    return show(view, controls, el("p", { class: "empty" }, "There are no checkpoints here yet."));
  }
  const metrics = [...new Set(listing.checkpoints.flatMap((one) => Object.keys(one.metrics || {})))].slice(0, 6);
  const columns = [["newest", "Step"], ["created", "Created"], ["bytes", "Size:n"], ["share", "Of raw:n"], ["world_size", "Ranks:n"],
    ...(listing.checkpoints.some((one) => one.chain) ? [["new_bytes", "New:n"], ["chain", "Chain:n"]] : []),
    ...(listing.checkpoints.some((one) => known(one.non_finite)) ? [["non_finite", "Not finite:n"]] : []),
    ...metrics.map((name) => [`metric ${name}`, name, "n"])];
  const rows = sorted(listing.checkpoints);
  show(view, controls, sheet(el("table", { class: "cards" },
    el("caption", {}, `${plural(listing.checkpoints.length + listing.more, "checkpoint")} of ${listing.job}`, listing.more ? `, the newest ${count(listing.checkpoints.length)} shown` : ""),
    el("thead", {}, el("tr", {}, columns.map(([key, title, kind]) => el("th", {
      scope: "col", class: kind || title.split(":")[1], "aria-sort": state.sort === key ? (state.down ? "descending" : "ascending") : "none",
    }, el("button", { "data-sort": key }, kind ? title : title.split(":")[0]))), el("th", { scope: "col" }, "Tag"))),
    el("tbody", {}, rows.slice(0, state.listed).map((one) => checkpointRow(one, listing.job, metrics, columns))))),
  rows.length > state.listed ? el("p", { class: "more" }, el("button", { class: "act", "data-more": "listed" }, `Show all ${count(rows.length)}`)) : null);
  return undefined;
}

/** Return a metric of a checkpoint. Its name may be one that every object has. */
function metricOf(one, name) {
  return one.metrics && Object.hasOwn(one.metrics, name) ? one.metrics[name] : undefined;
}

function valueOf(one, key) {
  if (key === "newest") return undefined;
  if (key === "share") return one.bytes / one.raw_bytes;
  if (key.startsWith("metric ")) {
    const value = metricOf(one, key.slice(7));
    return typeof value === "string" ? { inf: Infinity, "-inf": -Infinity }[value] : value;
  }
  return one[key];
}

/** Order rows by the chosen column. Those without a value come last, in either order. */
function sorted(rows) {
  if (state.sort === "newest") return state.down ? rows : [...rows].reverse();
  const number_of = (one) => valueOf(one, state.sort);
  const able = rows.filter((one) => known(number_of(one)) && !Number.isNaN(number_of(one)));
  able.sort((a, b) => (number_of(a) - number_of(b)) * (state.down ? -1 : 1));
  return [...able, ...rows.filter((one) => !able.includes(one))];
}

function checkpointRow(one, job, metrics, columns) {
  const marks = ["newest", "pinned"].filter((mark) => one[mark]).map((mark) => [" ", el("span", { class: "mark quiet" }, mark)]);
  if (one.damaged) {
    return el("tr", {}, el("th", { scope: "row", "data-label": "Step" }, el("span", { class: "mark s-failed" }, "damaged")),
      el("td", { colspan: columns.length - 1, class: "wrap" }, one.damaged), cell("Tag", el("span", { class: "mono" }, one.tag), "name"));
  }
  const link = el("a", { href: `#checkpoints/${encodeURIComponent(job)}/${encodeURIComponent(one.tag)}` }, known(one.step) ? count(one.step) : one.tag);
  return el("tr", {},
    el("th", { scope: "row", "data-label": "Step" }, el("span", {}, link, marks)),
    cell("Created", moment(one.created)), cell("Size", size(one.bytes), "n"),
    cell("Of raw", one.raw_bytes ? `${Math.round((100 * one.bytes) / one.raw_bytes)} %` : "–", "n"),
    cell("Ranks", count(one.world_size), "n"),
    columns.some(([key]) => key === "chain") ? [cell("New", size(one.new_bytes), "n"), cell("Chain", chain(one), "n")] : null,
    columns.some(([key]) => key === "non_finite") ? cell("Not finite", nonFinite(one), "n") : null,
    metrics.map((name) => cell(name, number(metricOf(one, name)), "n")),
    cell("Tag", el("span", { class: "mono quiet" }, one.tag), "name"));
}

/** Word whether a checkpoint is whole, or how many deltas its longest chain has. */
function chain(one) {
  return one.chain ? count(one.chain) : "whole";
}

/** Word how many values of the parameters and the optimizer state are not finite. */
function nonFinite(one) {
  return one.non_finite ? el("span", { class: "l-warning" }, count(one.non_finite)) : count(one.non_finite);
}

function checkpoint() {
  const { job, tag } = route();
  if (!tag) return undefined;
  const view = $("view-checkpoints"), one = state.details;
  const path = el("p", { class: "path" }, el("a", { href: `#checkpoints/${encodeURIComponent(job)}` }, job), " / ", el("span", { class: "mono" }, tag));
  if (state.detailsError) return show(view, path, trouble(state.detailsError), el("p", { class: "quiet" }, "Retention may have deleted it meanwhile."));
  if (!one) return undefined;
  const { manifest } = one;
  const metrics = Object.entries(one.metrics || {});
  const writer = Object.entries(manifest.writer || {});
  const found = one.tensors.filter((tensor) => tensor.name.toLowerCase().includes(state.filter.toLowerCase()));
  const total = one.tensors.reduce((sum, tensor) => sum + tensor.bytes, 0);
  show(view, path,
    el("h2", {}, known(one.step) ? `Step ${count(one.step)}` : one.tag),
    facts([
      ["Created", `${day(one.created)} ${clock(one.created)}`], ["Attempt", `${one.attempt}, number ${count(one.seq)} of the job`],
      ["Size", `${size(one.bytes)}, ${one.raw_bytes ? Math.round((100 * one.bytes) / one.raw_bytes) : 0} % of ${size(one.raw_bytes)}`],
      one.chain ? ["Deltas", `${size(one.new_bytes)} new, chain of ${count(one.chain)}`] : null,
      ["Restore", `reads ${size(one.restored_bytes)}${known(one.restore_seconds) ? `, about ${took(one.restore_seconds)} by the last recoveries` : ""}`],
      ["Ranks", count(one.world_size)],
      known(one.non_finite) ? ["Not finite", nonFinite(one)] : null,
      ...metrics.map(([name, value]) => [name, number(value)]),
      ...writer.map(([name, value]) => [name, value]),
      manifest.retention ? ["Retention", manifest.retention.join(", ")] : null,
    ].filter(Boolean)),
    el("h2", {}, "Tensors"),
    el("div", { class: "controls" },
      el("label", {}, "Name contains", el("input", { name: "filter", type: "search", autocomplete: "off", spellcheck: "false" })),
      el("span", { class: "quiet" }, `${count(found.length)} of ${plural(one.tensors_in_all, "tensor")}, ${size(total)}${one.other_values ? `; ${plural(one.other_values, "other value")}` : ""}`)),
    found.length ? sheet(el("table", { class: "cards" }, head(["Tensor", "Shape", "Dtype", "Size:n", "Numbers"]),
      el("tbody", {}, found.slice(0, state.tensorsShown).flatMap(tensorRows))))
      : el("p", { class: "empty" }, one.tensors.length ? "No tensor has such a name." : "This checkpoint has no tensors."),
    found.length > state.tensorsShown ? el("p", { class: "more" }, el("button", { class: "act", "data-more": "tensorsShown" }, `Show more of ${count(found.length)}`)) : null,
    el("h2", {}, "Manifest"),
    el("p", { class: "quiet" }, "Without the list of tensors. ", el("a", { href: `/api/manifest?${new URLSearchParams({ job, tag })}`, target: "_blank", rel: "noopener" }, "The whole document"),
      one.parts_not_shown ? `, also for ${count(one.parts_not_shown)} more parts` : "", "."),
    el("details", {}, el("summary", {}, "Show"), el("pre", { tabindex: 0 }, JSON.stringify(manifest, null, 1))));
  return undefined;
}

function tensorRows(tensor) {
  const measured = state.measured && state.measured.name === tensor.name ? state.measured : null;
  const busy = measured && measured.busy;
  const rows = [el("tr", {},
    el("th", { scope: "row", class: "name mono" }, tensor.name),
    cell("Shape", shape(tensor.shape)), cell("Dtype", tensor.dtype), cell("Size", size(tensor.bytes), "n"),
    cell("Numbers", el("button", { class: "act", "data-measure": tensor.name, "aria-expanded": measured ? "true" : "false" }, busy ? "Cancel" : measured ? "Close" : "Measure")))];
  if (measured) rows.push(el("tr", {}, el("td", { colspan: 5, class: "measure" }, measurement(measured))));
  return rows;
}

function measurement(found) {
  if (found.busy) return el("p", { class: "quiet", role: "status" }, "The tensor is being read.");
  if (found.error) return trouble(found.error);
  const what = found.magnitudes ? " (of magnitudes)" : "";
  const share = found.elements ? (100 * found.non_finite) / found.elements : 0;
  const pairs = [["Norm", number(found.norm)], [`Min${what}`, number(found.minimum)], [`Max${what}`, number(found.maximum)], [`Mean${what}`, number(found.mean)],
    ["Not finite", known(found.non_finite) ? `${count(found.non_finite)} (${share === 0 ? 0 : share < 0.01 ? "< 0.01" : share.toFixed(2)} %)` : "–"], ["Elements", count(found.elements)]];
  return el("div", {}, el("dl", { class: "numbers" }, pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    found.non_finite === null ? el("p", { class: "quiet" }, "Elements of this dtype are not numbers.") : histogram(found));
}

function histogram(found) {
  if (!found.bins.length) return null;
  const width = 600, height = 110, bottom = height - 18, most = Math.max(...found.bins), step = width / found.bins.length;
  return el("figure", {}, svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Histogram from ${number(found.minimum)} to ${number(found.maximum)}` },
    found.bins.map((value, at) => svg("rect", { class: "bin", x: at * step, width: Math.max(1, step - 1), y: bottom - (value / most) * bottom, height: (value / most) * bottom })),
    svg("line", { class: "axis", x1: 0, x2: width, y1: bottom, y2: bottom }),
    svg("text", { x: 0, y: height - 4 }, number(found.minimum)),
    svg("text", { x: width / 2, y: height - 4, "text-anchor": "middle" }, number((found.minimum + found.maximum) / 2)),
    svg("text", { x: width, y: height - 4, "text-anchor": "end" }, number(found.maximum))));
}

async function measure(name) {
  if (state.measuring) state.measuring.abort();
  if (state.measured && state.measured.name === name) {
    state.measured = state.measuring = null;
    return checkpoint();
  }
  const { job, tag } = route(), asked = (state.measuring = new AbortController());
  state.measured = { name, busy: true };
  checkpoint();
  let found;
  try {
    found = await ask("/api/tensor", { job, tag, name }, asked.signal);
  } catch (error) {
    found = { name, error };
  }
  if (asked.signal.aborted) return undefined;
  state.measured = found;
  return checkpoint();
}

// -- events

function events() {
  const view = $("view-events");
  const controls = el("div", { class: "controls" },
    el("label", {}, "Last", el("select", { name: "range" }, RANGES.map(([seconds, text]) =>
      el("option", { value: seconds, selected: seconds === state.range }, text)))),
    el("label", {}, "Level", el("select", { name: "level" }, [["all", "all"], ["warning", "warnings and errors"]].map(([value, text]) =>
      el("option", { value, selected: value === state.level }, text)))));
  if (state.historyError) return show(view, controls, trouble(state.historyError));
  const found = (state.history ? state.history.events : []).filter((one) => state.level === "all" || one.level >= 30);
  if (!found.length) {
    return show(view, controls, el("p", { class: "empty" }, state.history ? state.history.note || "Nothing happened in this time." : "The history is being read."));
  }
  return show(view, controls, sheet(el("table", { class: "cards" }, head(["Time", "Event", "Job", "What happened"]),
    el("tbody", {}, found.map((one) => el("tr", {},
      el("td", { "data-label": "Time", class: "n" }, el("span", {}, moment(one.time))),
      cell("Event", el("span", { class: one.level >= 40 ? "l-error" : one.level >= 30 ? "l-warning" : null }, one.event)),
      cell("Job", one.job || "–", "name"), cell("What", one.text, "wrap")))))),
  el("p", { class: "quiet more" }, "At most the newest 400 events. ", "`ckptd history` prints more."));
}

// -- where the reader is

function route() {
  const parts = location.hash.slice(1).split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  const view = ["overview", "timeline", "checkpoints", "events"].includes(parts[0]) ? parts[0] : "overview";
  return { view, job: parts[1] || "", tag: parts[2] || "" };
}

function arrive() {
  if (location.hash === "#main") return $("main").focus();
  const { view, job, tag } = route();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== `view-${view}`;
  if (state.measuring) state.measuring.abort();
  if (view === "overview") overview();
  if (view === "timeline") timeline();
  if (view === "events") events();
  if (view === "checkpoints") loadCheckpoints(job, tag);
  return undefined;
}

document.addEventListener("change", ({ target }) => {
  if (target.name === "range") {
    state.range = Number(target.value);
    state.history = null;
    state.historyBusy = false;
    loadHistory();
    arrive();
  } else if (target.name === "only") {
    state.job = target.value;
    timeline();
  } else if (target.name === "level") {
    state.level = target.value;
    events();
  } else if (target.name === "job") {
    location.hash = `#checkpoints/${encodeURIComponent(target.value)}`;
  }
});

document.addEventListener("input", ({ target }) => {
  if (target.name === "filter") {
    state.filter = target.value;
    checkpoint();
  }
});

document.addEventListener("click", ({ target }) => {
  const button = target.closest && target.closest("button");
  if (!button) return;
  const { sort, more, measure: name, act } = button.dataset;
  if (sort) {
    state.down = state.sort === sort ? !state.down : sort === "newest" || sort === "created";
    state.sort = sort;
    checkpoints();
  } else if (more) {
    state[more] = more === "listed" ? Infinity : state[more] + 200;
    arrive();
  } else if (name !== undefined) {
    measure(name);
  } else if (act === "reload") {
    state.listing = null;
    loadCheckpoints(route().job, "");
  }
});

document.addEventListener("toggle", ({ target }) => {
  if (target.id === "ranks") overview();
}, true);

let resized = 0;
window.addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => { if (route().view === "timeline") timeline(); }, 150);
});
window.addEventListener("hashchange", arrive);
setInterval(tell, 1000);
connect();
arrive();
loadHistory();
