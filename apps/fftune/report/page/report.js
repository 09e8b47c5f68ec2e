// Draws the report's data with Chart.js. Every text goes in as text, never as markup: ids, reasons
// and names come from files.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const charts = [];

// ---- Elements ----

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function table(caption, columns, rows) {
  const cell = (tag, content, column, attributes = {}) => {
    const node = element(tag, attributes, content instanceof Node ? content : String(content));
    if (column.number) node.className = "number";
    return node;
  };
  const head = element("tr", {}, ...columns.map((column) =>
    cell("th", column.title, column, { scope: "col" })));
  const body = rows.map((row) => element("tr", {}, ...row.map((content, i) =>
    cell(i === 0 ? "th" : "td", content, columns[i], i === 0 ? { scope: "row" } : {}))));
  return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {}, element("caption", {}, caption), element("thead", {}, head),
      element("tbody", {}, ...body)));
}

function details(title, ...children) {
  return element("details", {}, element("summary", {}, title), ...children);
}

function code(text) {
  return element("code", { class: "id" }, text);
}

// ---- Numbers ----

function microseconds(value) {
  if (!(value > 0)) return "-";
  return value >= 1000 ? value.toFixed(0) : value.toPrecision(4);
}
const mostShareOfLimit = Number("/*most_share_of_limit*/");
const percent = (fraction) =>
  fraction > mostShareOfLimit ? "above the limit" : (100 * fraction).toFixed(1) + "%";
// What is below 1 reads differently without colour too.
const ratio = (value) =>
  value > 0 ? (value < 1 ? "▼ " : "") + value.toFixed(2) + "×" : "-";
const interval = (low, high) => microseconds(low) + " to " + microseconds(high);

// ---- Colours ----

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}
const faint = (hex) => hex + "33";
const shapes = ["circle", "triangle", "rect", "rectRot", "star", "crossRot"];
const dashes = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 5], [1, 4]];

// ---- Charts ----

/// A chart that the keyboard walks through: `describe` is its label, `say(i)` the words of the i-th
/// place on its axis, and `build` its configuration in the present colours.
function figure(caption, describe, build, low = false) {
  const canvas = element("canvas", { role: "img", tabindex: "0", "aria-label": describe });
  charts.push({ canvas, build, chart: null });
  canvas.addEventListener("keydown", (event) => walk(event, canvas));
  canvas.addEventListener("blur", () => point(canvas, []));
  return element("figure", {}, element("figcaption", {}, caption),
    element("div", { class: low ? "plot low" : "plot" }, canvas));
}

function point(canvas, elements) {
  const { chart } = charts.find((each) => each.canvas === canvas);
  if (!chart) return;
  chart.setActiveElements(elements);
  chart.tooltip.setActiveElements(elements, { x: 0, y: 0 });
  chart.update();
}

/// The arrow keys go from point to point; what is there is said aloud too.
function walk(event, canvas) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const { chart } = charts.find((each) => each.canvas === canvas);
  const across = chart.options.indexAxis !== "y";
  const points = [];
  chart.data.datasets.forEach((dataset, datasetIndex) => {
    if (dataset.band) return;
    chart.getDatasetMeta(datasetIndex).data.forEach((mark, index) => {
      if (dataset.data[index].x !== null)
        points.push({ datasetIndex, index, at: across ? mark.x : mark.y });
    });
  });
  if (points.length === 0) return;
  const places = [...new Set(points.map((each) => Math.round(each.at)))].sort((a, b) => a - b);
  const last = Number(canvas.dataset.place ?? (step > 0 ? -1 : places.length));
  const place = Math.min(Math.max(last + step, 0), places.length - 1);
  canvas.dataset.place = place;
  const here = points.filter((each) => Math.round(each.at) === places[place]);
  point(canvas, here.map(({ datasetIndex, index }) => ({ datasetIndex, index })));
  document.getElementById("announcement").textContent = here.map(({ datasetIndex, index }) =>
    label(chart.data.datasets[datasetIndex], chart.data.datasets[datasetIndex].data[index])).join("; ");
}

function label(dataset, raw) {
  return dataset.label + ": " + (raw.words ?? microseconds(raw.y ?? raw));
}

function drawAll() {
  Chart.defaults.color = color("text");
  Chart.defaults.borderColor = color("line");
  Chart.defaults.font.family = "system-ui, sans-serif";
  Chart.defaults.animation = false;
  for (const each of charts) {
    if (each.chart) each.chart.destroy();
    each.chart = new Chart(each.canvas, each.build());
  }
}

/// A line with a point for each {x, y, words}, and its band of {x, low, high} where that is known.
function series(index, name, points, extra = {}) {
  const tone = extra.limit ? color("limit") : color("series-" + (index % 6));
  const line = {
    label: name, data: points, borderColor: tone, backgroundColor: tone, borderWidth: 2,
    borderDash: extra.limit ? [3, 3] : dashes[index % 6],
    pointStyle: extra.limit ? "line" : shapes[index % 6], pointRadius: extra.limit ? 6 : 4,
    stepped: extra.stepped ?? false,
  };
  if (!points.some((each) => each.high > each.low)) return [line];
  const edge = (key, fill) => ({
    label: name + " 95% interval", band: true, data: points.map((each) => ({ x: each.x, y: each[key] ?? each.y })),
    borderWidth: 0, pointRadius: 0, pointHitRadius: 0, backgroundColor: faint(tone), fill,
  });
  return [line, edge("low", false), edge("high", "-1")];
}

function plugins() {
  return {
    legend: { position: "bottom", labels: { usePointStyle: true, filter: (item, chart) => !chart.datasets[item.datasetIndex].band } },
    tooltip: {
      mode: "nearest", intersect: false, axis: "x", filter: (item) => !item.dataset.band && item.raw.x !== null,
      callbacks: { label: (item) => label(item.dataset, item.raw) },
    },
  };
}

function lineChart(datasets, x, y) {
  return {
    type: "line", data: { datasets },
    options: {
      responsive: true, maintainAspectRatio: false, plugins: plugins(),
      scales: {
        x: {
          type: x.log ? "logarithmic" : "linear", title: { display: true, text: x.title },
          afterBuildTicks: x.places ? (axis) => { axis.ticks = x.places.map((value) => ({ value })); } : undefined,
          ticks: { callback: (value) => value },
        },
        y: {
          type: y.log ? "logarithmic" : "linear", title: { display: true, text: y.title },
          beginAtZero: !y.log, suggestedMax: y.most,
          ticks: { callback: (value) => y.log && !/^[125]/.test(String(value).replace(/^[0.]+/, "")) ? "" : value },
        },
      },
    },
  };
}

/// Horizontal bars, one a name, which is broken between words where the page is narrow.
function barChart(names, datasets, title, log) {
  const broken = innerWidth < 700 ? /.{1,16}(?:\s|$)|\S{1,22}/g : /.{1,44}(?:\s|$)/g;
  return {
    type: "bar", data: { labels: names.map((name) => name.match(broken) ?? name), datasets },
    options: {
      indexAxis: "y", responsive: true, maintainAspectRatio: false,
      plugins: { ...plugins(), tooltip: { ...plugins().tooltip, axis: "y" } },
      scales: {
        x: { type: log ? "logarithmic" : "linear", beginAtZero: false, title: { display: true, text: title }, ticks: { maxRotation: 0 } },
        y: { ticks: { autoSkip: false, font: { size: innerWidth < 700 ? 10 : 12 } } },
      },
    },
  };
}

// ---- One op on one device ----

const groupBy = (list, key) => {
  const groups = new Map();
  for (const each of list) {
    if (!groups.has(key(each))) groups.set(key(each), []);
    groups.get(key(each)).push(each);
  }
  return groups;
};

/// The lines of a layer: fftune's, the unfused pipeline's, every contender of a bench, the limit.
function linesOf(records, benches) {
  const lines = [];
  const words = (us, low, high) => microseconds(us) + " µs" + (high > low ? ", " + interval(low, high) : "");
  for (const [path, group] of groupBy(records, (record) => record.path)) {
    lines.push({
      name: data.paths.length > 1 ? "fftune, " + data.paths[path] : "fftune",
      points: group.map((record) => ({ x: record.tokens, y: record.us, low: record.low, high: record.high, words: words(record.us, record.low, record.high) })),
    });
  }
  const unfused = records.filter((record) => record.unfused > 0);
  if (unfused.length > 0 && benches.length === 0)
    lines.push({
      name: "unfused pipeline",
      points: unfused.map((record) => ({ x: record.tokens, y: record.us * record.unfused, words: microseconds(record.us * record.unfused) + " µs" })),
    });
  const entries = benches.flatMap((bench) => bench.entries.filter((entry) => entry.us > 0).map((entry) => ({ ...entry, tokens: bench.tokens })));
  for (const [name, group] of groupBy(entries, (entry) => entry.name))
    lines.push({
      name: "bench: " + name,
      points: group.map((entry) => ({ x: entry.tokens, y: entry.us, low: entry.low, high: entry.high, words: words(entry.us, entry.low, entry.high) })),
    });
  const floors = [...records, ...benches].filter((each) => each.floor > 0);
  const limits = new Map(floors.map((each) => [each.tokens, each]));
  lines.push({
    name: "limit", limit: true,
    points: [...limits.values()].map((each) => ({ x: each.tokens, y: each.floor, words: microseconds(each.floor) + " µs by " + each.limit })),
  });
  for (const line of lines) line.points.sort((a, b) => a.x - b.x);
  return lines.filter((line) => line.points.length > 0);
}

function layerFigures(layer, records, benches) {
  const tokenSize = (records[0] ?? benches[0]).token_size;
  const lines = linesOf(records, benches);
  const places = [...new Set(lines.flatMap((line) => line.points.map((each) => each.x)))].sort((a, b) => a - b);
  const first = lines[0].points;
  const said = `${lines.map((line) => line.name).join(", ")}; ${lines[0].name} takes ${first.map((each) => `${microseconds(each.y)} µs at ${tokenSize} ${each.x}`).join(", ")}. Arrow keys go from point to point.`;
  const time = figure(`Time against ${tokenSize}, with 95% intervals`, `Time against ${tokenSize}: ${said}`, () =>
    lineChart(lines.flatMap((line, i) => series(i, line.name, line.points, line)), { title: tokenSize, log: true, places }, { title: "µs", log: true }));
  const limits = new Map(lines.at(-1).points.map((each) => [each.x, each.y]));
  const shares = lines.slice(0, -1).map((line) => ({
    name: line.name,
    points: line.points.filter((each) => limits.has(each.x)).map((each) => ({ x: each.x, y: 100 * limits.get(each.x) / each.y, words: percent(limits.get(each.x) / each.y) })),
  }));
  const roofline = figure("Share of the limit (roofline)", `Share of the roofline against ${tokenSize}: ${shares[0].points.map((each) => `${each.words} at ${each.x}`).join(", ")}`, () =>
    lineChart(shares.flatMap((line, i) => series(i, line.name, line.points)), { title: tokenSize, log: true, places }, { title: "% of the limit", most: 100 }));
  return [element("h3", {}, layer), element("div", { class: "charts" }, time, roofline)];
}

/// Problems whose layer was tuned at one number of tokens: one row each.
function singleFigure(records) {
  const names = records.map((record) => record.layer + " " + record.token_size + "=" + record.tokens);
  const mark = (values, i, name, style) => ({
    type: "line", label: name, showLine: false, data: values, borderColor: color(style), backgroundColor: color(style),
    pointStyle: shapes[i], pointRadius: 5,
  });
  const node = figure("Time of each problem beside its limit", "Time of each problem: " + records.map((record, i) => `${names[i]} takes ${microseconds(record.us)} µs, ${percent(record.roofline)} of the limit`).join("; "), () =>
    barChart(names, [
      { label: "limit to median", data: records.map((record) => [Math.min(record.floor, record.us), record.us]), backgroundColor: faint(color("series-0")), borderColor: color("series-0"), borderWidth: 1, borderSkipped: false, barPercentage: 0.5 },
      mark(records.map((record, i) => ({ x: record.us, y: i, words: microseconds(record.us) + " µs" })), 0, "fftune", "series-0"),
      mark(records.map((record, i) => ({ x: record.floor, y: i, words: microseconds(record.floor) + " µs by " + record.limit })), 2, "limit", "limit"),
      mark(records.map((record, i) => ({ x: record.unfused > 0 ? record.us * record.unfused : NaN, y: i, words: ratio(record.unfused) + " of fftune's time" })), 1, "unfused pipeline", "series-1"),
    ], "µs", true));
  node.querySelector(".plot").style.height = Math.max(10, 4 + 3.2 * records.length) + "rem";
  return node;
}

function recordTable(records) {
  const several = data.paths.length > 1;
  return table("Results", [
    { title: "problem" }, ...(several ? [{ title: "from" }] : []), { title: "median µs", number: true }, { title: "95% interval", number: true },
    { title: "roofline", number: true }, { title: "limit" }, { title: "unfused / fftune", number: true },
    { title: "decided" }, { title: "winner" },
  ], records.map((record) => [
    `${record.layer} ${record.token_size}=${record.tokens}`, ...(several ? [data.paths[record.path]] : []), microseconds(record.us), interval(record.low, record.high),
    percent(record.roofline), record.limit, ratio(record.unfused),
    (record.decided === null ? "unknown" : record.decided ? "yes" : "no") + (record.complete ? "" : ", ended early") + (record.disturbances.length ? ", disturbed" : ""),
    code(record.stages.map((stage) => stage.id).join(" + ")),
  ]));
}

function recordDetails(record) {
  const rows = [];
  for (const stage of record.stages) {
    rows.push([stage.stages, "winner", microseconds(stage.us), ratio(1), code(stage.id)]);
    for (const [what, list] of [["tie", stage.ties], ["runner-up", stage.runners_up]])
      for (const each of list) rows.push([stage.stages, what, microseconds(each.us), ratio(each.us / stage.us), code(each.id)]);
  }
  return details(`${record.layer} ${record.token_size}=${record.tokens}: ties, runners-up, provenance`,
    table("Winner, ties and runners-up of each stage", [{ title: "stage" }, { title: "" }, { title: "µs", number: true }, { title: "of the winner's", number: true }, { title: "variant" }], rows),
    element("p", {}, record.stages.map((stage) => `${stage.stages}: ${stage.measured} of ${stage.feasible} feasible variants ran, ${stage.failed} failed`).join("; ")),
    ...(record.doubts.length ? [element("p", {}, "Undecided: " + record.doubts.join("; "))] : []),
    ...(record.disturbances.length ? [element("p", {}, "Disturbed: " + record.disturbances.join("; "))] : []),
    element("p", {}, `Error ${record.error.toExponential(1)} of ${record.tolerance.toExponential(1)} allowed; noise floor ${percent(record.noise)}.`),
    element("p", { class: "dim" }, `${record.provenance}, ${record.date}; ${record.file}`),
    element("pre", {}, element("code", {}, record.command)));
}

// ---- Searches ----

function searchFigures(search) {
  const groups = search.groups.filter((group) => group.best.length > 0);
  const steps = (group, at, end) => {
    const points = group.best.map((step) => ({ x: step[at], y: step[2], words: `${microseconds(step[2])} µs after ${at === 0 ? step[0].toFixed(1) + " s" : step[1] + " variants"}` }));
    const last = group.best.at(-1)[2];
    return [...points, { x: end, y: last, words: microseconds(last) + " µs at the end" }];
  };
  const draw = (caption, at, title, end) => figure(caption, `${caption}: ` + groups.map((group) => `${group.stages} from ${microseconds(group.best[0][2])} to ${microseconds(group.best.at(-1)[2])} µs`).join("; "), () =>
    lineChart(groups.flatMap((group, i) => series(i, group.stages, steps(group, at, end(group)), { stepped: true })), { title }, { title: "best µs so far", log: true }), true);
  const nodes = [];
  if (groups.length > 0)
    nodes.push(element("div", { class: "charts" },
      draw("Best time so far against time", 0, "seconds", (group) => group.seconds),
      draw("Best time so far against variants", 1, "variants measured", (group) => group.measured)));
  for (const group of groups) if (group.parameters.length > 0) nodes.push(worth(group));
  for (const group of search.groups) if (group.failures.length > 0) nodes.push(failures(group));
  return nodes;
}

/// The best time with another value than the winner's, over the best time: from the next best value
/// to the worst.
function worth(group) {
  const rows = group.parameters.map((parameter) => {
    const [best, ...others] = parameter.values;
    return { name: parameter.name, values: parameter.values, low: others[0].us / best.us, high: others.at(-1).us / best.us };
  }).sort((a, b) => b.low - a.low);
  const node = figure(`What each parameter is worth: ${group.stages}`, `What each parameter of ${group.stages} is worth: ` + rows.map((row) => `${row.name}: another value takes ${row.low.toFixed(2)} to ${row.high.toFixed(2)} times as long`).join("; "), () =>
    barChart(rows.map((row) => row.name), [{
      label: "time with another value, from the next best to the worst", data: rows.map((row, i) => ({ x: [row.low, row.high], y: i, words: `${row.low.toFixed(3)} to ${row.high.toFixed(3)} times as long` })),
      backgroundColor: color("series-0"), borderSkipped: false, barPercentage: 0.6, minBarLength: 4,
    }], "times the best time", true), true);
  node.querySelector(".plot").style.height = Math.max(10, 6 + 1.6 * rows.length) + "rem";
  node.append(details("The best time at each value", table(`Best time at each value, ${group.stages}`, [{ title: "parameter" }, { title: "value: best µs (variants)" }],
    rows.map((row) => [row.name, row.values.map((each) => `${each.value}: ${microseconds(each.us)} (${each.variants})`).join("; ")]))));
  return node;
}

function failures(group) {
  return table(`Variants of ${group.stages} that failed`, [{ title: "kind" }, { title: "how many", number: true }, { title: "reason of the first" }, { title: "the first" }],
    group.failures.map((each) => [each.kind.replaceAll("_", " "), each.count, each.reason, code(each.id)]));
}

// ---- At a glance ----

/// "fwd bf16": the words in front of a record's options.
const passAndType = (record) => record.layer.split(" ").slice(0, 2).join(" ");

/// The problems that every device with one of these records has; all of them if it has none in common.
function sharedProblems(records) {
  const of = [...groupBy(records, (record) => record.device).values()]
    .map((own) => new Set(own.map((record) => record.problem)));
  const shared = [...of[0]].filter((problem) => of.every((each) => each.has(problem)));
  return new Set(shared.length > 0 ? shared : records.map((record) => record.problem));
}

/// Every op's share of the limit, a device beside the other, over the same problems where there are
/// some. `sections` gives the id of an op's section on a device.
function glanceSection(sections) {
  const devices = [...new Set(data.records.map((record) => record.device))];
  const rows = [...groupBy(data.records, (record) => `${record.op} ${passAndType(record)}`)].sort()
    .map(([name, records]) => {
      const problems = sharedProblems(records);
      return { name, shares: devices.map((device) => {
        const own = records.filter((record) => record.device === device);
        const sorted = own.filter((record) => problems.has(record.problem))
          .map((record) => record.roofline).sort((a, b) => a - b);
        const middle = sorted.length / 2;
        const median = (sorted[Math.ceil(middle) - 1] + sorted[Math.floor(middle)]) / 2;
        const range = sorted.length > 1 ? ` (${percent(sorted[0])} to ${percent(sorted.at(-1))})` : "";
        const counted = sorted.length < own.length ? `${sorted.length} of ${own.length}` : `${own.length}`;
        return { median, count: own.length, counted, words: own.length ? percent(median) + range : "no record",
          section: sections.get(`${records[0].op}\n${device}`) };
      }) };
    });
  const node = figure("Median share of the limit (roofline), over the problems that the devices have in common where there are some", "Median share of the roofline: " + rows.map((row) => `${row.name}: ` + row.shares.map((share, i) => `${share.words} on ${devices[i]}`).join(", ")).join("; "), () =>
    barChart(rows.map((row) => row.name), devices.map((device, i) => ({
      label: device, backgroundColor: color("series-" + (i % 6)), barPercentage: 0.9, skipNull: true,
      data: rows.map(({ shares }, y) => ({ y, words: shares[i].words,
        x: shares[i].count === 0 ? null : 100 * Math.min(shares[i].median, mostShareOfLimit) })),
    })), "% of the limit", false));
  node.querySelector(".plot").style.height = 6 + (1 + 0.6 * devices.length) * rows.length + "rem";
  const cell = (share) => share.count === 0 ? "-" :
    element("a", { href: "#" + share.section }, `${share.words}, ${share.counted} record${share.count > 1 ? "s" : ""}`);
  return element("section", { id: "glance" }, element("h2", {}, "At a glance"), node,
    element("p", {}, "The limit counts bytes and operations alone: work of a few microseconds, such as that of one token, also takes the time of its launches, and has a small share."),
    table("Median share of the limit, from the least to the most, over those records; the links lead to all of them",
      [{ title: "op, pass, dtype" }, ...devices.map((device) => ({ title: device }))],
      rows.map((row) => [row.name, ...row.shares.map(cell)])));
}

// ---- Comparisons ----

function comparisonSection() {
  const rows = data.comparisons.map((each) => {
    const before = data.records[each.before], after = data.records[each.after];
    return { ...each, before, after, least: after.low / before.high, most: after.high / before.low, name: `${after.problem}` };
  });
  const who = (record) => `${record.device}, ${record.date.slice(0, 10)}` + (data.paths.length > 1 ? `, ${data.paths[record.path]}` : "");
  const counts = ["FASTER", "SLOWER", "SAME", "UNDECIDED"].map((name) => `${rows.filter((row) => row.verdict === name).length} ${name}`).join(", ");
  const only = (side) => new Set(rows.map((row) => row[side].device)).size === 1;
  const named = only("before") && only("after") && rows[0].before.device !== rows[0].after.device;
  const [first, second] = named ? [rows[0].before.device, rows[0].after.device] : ["the first", "the second"];
  const tones = { FASTER: "good", SLOWER: "bad", SAME: "limit", UNDECIDED: "caution" };
  const node = figure(`Time of ${second} over that of ${first}, by the 95% intervals: below 1 ${second} is faster`, "Comparison: " + rows.map((row) => `${row.name}: ${row.verdict}`).join("; "), () =>
    barChart(rows.map((row) => row.name + " " + row.verdict), [{
      label: `${second} / ${first}`, data: rows.map((row, i) => ({ x: [row.least, row.most], y: i, words: `${row.least.toFixed(3)} to ${row.most.toFixed(3)}, ${row.verdict}` })),
      backgroundColor: rows.map((row) => color(tones[row.verdict])), borderSkipped: false, barPercentage: 0.6, minBarLength: 3,
    }], `${second} / ${first}`, false));
  node.querySelector(".plot").style.height = Math.max(10, 6 + 3.2 * rows.length) + "rem";
  return element("section", { id: "comparison" }, element("h2", {}, "Side by side"),
    element("p", {}, `${counts}. FASTER: the interval of ${second} is below that of ${first}. SLOWER: it is above. SAME: they lie within 2% of each other. UNDECIDED: more samples are needed.`),
    node,
    table("Comparison", [{ title: "problem" }, { title: "first" }, { title: "µs", number: true }, { title: "second" }, { title: "µs", number: true }, { title: "second / first", number: true }, { title: "verdict of the second" }],
      rows.map((row) => [row.name, who(row.before), microseconds(row.before.us), who(row.after), microseconds(row.after.us), ratio(row.after.us / row.before.us), element("span", { class: row.verdict }, row.verdict)])));
}

// ---- The page ----

function opSection(op, device, records, benches, searches, id) {
  const section = element("section", { id }, element("h2", {}, `${op} on ${device}`));
  const single = [];
  const layers = groupBy([...records, ...benches], (each) => each.layer);
  for (const [layer, all] of layers) {
    const own = all.filter((each) => "us" in each), contenders = all.filter((each) => "entries" in each);
    if (new Set(all.map((each) => each.tokens)).size > 1 || own.length === 0 || contenders.length > 0) section.append(...layerFigures(layer, own, contenders));
    else single.push(...own);
  }
  if (single.length > 0) section.append(singleFigure(single));
  if (records.length > 0) section.append(recordTable(records), ...records.map(recordDetails));
  for (const search of searches)
    section.append(element("h3", {}, "Search: " + search.problem), element("p", { class: "dim" },
      `${search.journal}; ${search.provenance}; ` + search.groups.map((group) => `${group.stages}: ${group.measured} measured, ${group.cached} from the cache, ${group.compile_seconds.toFixed(1)} s compiling`).join("; ")),
      ...searchFigures(search));
  return section;
}

function build() {
  const main = document.getElementById("content"), contents = document.getElementById("contents");
  // One line for the sections of all devices, and one for each device.
  const lines = new Map();
  const enter = (id, title, device = "") => {
    if (!lines.has(device)) {
      lines.set(device, element("li", {}, ...(device ? [element("strong", {}, device)] : [])));
      contents.append(lines.get(device));
    }
    lines.get(device).append(element("a", { href: "#" + id }, title));
  };
  document.getElementById("summary").textContent =
    `${data.records.length} records, ${data.searches.length} searches and ${data.benches.length} bench rows from ${data.paths.join(", ")}; made by fftune ${data.fftune} on ${data.date.replace("T", ", ").replace(/:\d+Z$/, " UTC")}.`;
  document.getElementById("footer").textContent =
    "Times are medians with 95% confidence intervals; the limit (roofline) is measured on the device. Drawn by Chart.js (MIT licence), which this file contains.";
  const groups = groupBy([...data.records, ...data.benches, ...data.searches],
    (each) => each.op + "\n" + each.device);
  const sections = new Map([...groups.keys()].map((key, i) => [key, "section-" + i]));
  if (new Set(data.records.map((record) => record.op + "\n" + record.device)).size > 1) {
    main.append(glanceSection(sections));
    enter("glance", "At a glance");
  }
  if (data.comparisons.length > 0) {
    main.append(comparisonSection());
    enter("comparison", "Side by side");
  }
  for (const [key, group] of groups) {
    const { op, device } = group[0], id = sections.get(key);
    const of = (list) => list.filter((each) => each.op === op && each.device === device);
    main.append(opSection(op, device, of(data.records), of(data.benches), of(data.searches), id));
    enter(id, op, device);
  }
}

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").setAttribute("aria-pressed", dark);
  drawAll();
}

build();
drawAll();
const preference = matchMedia("(prefers-color-scheme: dark)");
document.getElementById("theme").setAttribute("aria-pressed", preference.matches);
preference.addEventListener("change", (event) => setTheme(event.matches));
document.getElementById("theme").addEventListener("click", () =>
  setTheme(document.getElementById("theme").getAttribute("aria-pressed") !== "true"));
