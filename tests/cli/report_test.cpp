// The report: what it holds, and that a browser without a network draws it.
#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "apps/fftune/report/report.hpp"
#include "process.hpp"
#include "registry/catalog.hpp"
#include "sandbox.hpp"
#include "support/catch.hpp"
#include "support/json.hpp"

using namespace fftune::testing;
using nlohmann::json;

namespace {

namespace fs = std::filesystem;

const fs::path preset_folder = fs::path(FFTUNE_SOURCE_DIR) / "presets";

/// The page of `fftune report` with these paths; empty, with a reason, if it was built without
/// Chart.js.
std::optional<std::string> report(const Sandbox& sandbox, const std::string& paths) {
  const Finished done = sandbox.fftune("report -o page.html " + paths);
  if (done.code == 3 && done.err.find("libjs-chart.js") != done.err.npos) return {};
  INFO(done.err);
  REQUIRE(done.code == 0);
  return text_of(sandbox.folder() / "page.html");
}

json data_of(const std::string& page) {
  const std::string start = "<script type=\"application/json\" id=\"data\">";
  const std::size_t begin = page.find(start) + start.size();
  return json_of(page.substr(begin, page.find("</script>", begin) - begin));
}

void replace(std::string& text, const std::string& what, const std::string& by) {
  const std::size_t at = text.find(what);
  REQUIRE(at != text.npos);
  text.replace(at, what.size(), by);
}

/// A preset file of one record, at this time with 1% around it.
std::string preset_text(const std::string& device, double us) {
  json file = json_of(text_of(preset_folder / "nvidia-h200/ffn.json"));
  json record = file["records"][0];
  record["verdict"]["median_us"] = us;
  record["verdict"]["interval_low_us"] = us * 0.999;
  record["verdict"]["interval_high_us"] = us * 1.001;
  file["records"] = json::array({record});
  file["device"]["name"] = device;
  return file.dump();
}

const std::vector<std::string> browsers{"/usr/bin/chromium-headless-shell", "/usr/bin/chromium",
                                        "/usr/bin/google-chrome", "/usr/bin/chromium-browser"};

/// The browsers that are here and start: a snap's launcher may be there without its browser. One
/// program under two names is one.
std::vector<std::string> browsers_here(const Sandbox& sandbox) {
  std::vector<std::string> found;
  std::set<fs::path> programs;
  for (const std::string& path : browsers) {
    if (!fs::exists(path) || !programs.insert(fs::canonical(path)).second) continue;
    Process version({path, "--version"},
                    {"HOME=" + sandbox.folder().string(), "PATH=/usr/bin:/bin"}, sandbox.folder());
    if (version.wait().code == 0) found.push_back(path);
  }
  return found;
}

struct View {
  int width = 1280;
  bool dark = false;
};

/// The page as a script in it finds it: for each chart its label, its size, and how many pixels and
/// colours are drawn.
const char* const probe = R"(<script>
(async () => {
const seen = { charts: [], errors: [] };
await new Promise(requestAnimationFrame);
for (const canvas of document.querySelectorAll("canvas")) {
  const { width, height } = canvas;
  const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const colours = new Set(); let drawn = 0;
  for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 200) {
    drawn++; colours.add(pixels[i] + "," + pixels[i + 1] + "," + pixels[i + 2]);
  }
  const series = ["--series-0", "--series-1", "--series-2", "--limit", "--good", "--bad", "--caution"].filter((name) => {
    const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    return colours.has([1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(","));
  });
  seen.charts.push({ label: canvas.getAttribute("aria-label"), role: canvas.getAttribute("role"),
    focusable: canvas.tabIndex === 0, width: canvas.clientWidth, drawn, series });
}
const first = document.querySelector("canvas");
first.focus();
first.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
seen.said = document.getElementById("announcement").textContent;
seen.pageWidth = document.documentElement.scrollWidth;
seen.windowWidth = innerWidth;
seen.ground = getComputedStyle(document.body).backgroundColor;
const links = [...document.querySelectorAll("#glance td a")];
seen.glance = { rows: document.querySelectorAll("#glance tbody tr").length, links: links.length,
  lost: links.filter((link) => !document.querySelector(link.getAttribute("href"))).length,
  words: document.querySelector("#glance canvas")?.getAttribute("aria-label") };
seen.unlabelled = [...document.querySelectorAll("table")].filter((each) => !each.caption).length;
document.getElementById("theme").click();
seen.otherGround = getComputedStyle(document.body).backgroundColor;
seen.injected = document.querySelectorAll("b").length;
parent.postMessage(JSON.stringify(seen), "*");
})();
</script>)";

/// The window: the page is in a frame of the view's width, because an ordinary browser's window is
/// no narrower than some 500 pixels. The frame has the window's colour scheme.
std::string window_page(int width) {
  return R"(<!doctype html><meta charset="utf-8">
<style>:root { color-scheme: light dark; } body { margin: 0; } iframe { border: 0; }</style>
<script>
addEventListener("message", (event) => {
  document.body.innerHTML = "";
  document.body.append(Object.assign(document.createElement("pre"), { id: "seen", textContent: event.data }));
});
</script>
<iframe src="probed.html" width=")" +
         std::to_string(width) + R"(" height="900"></iframe>)";
}

std::string unescaped(std::string text) {
  for (const auto& [what, by] : {std::pair<std::string, std::string>{"&lt;", "<"},
                                 {"&gt;", ">"},
                                 {"&nbsp;", " "},
                                 {"&amp;", "&"}})
    for (std::size_t at = text.find(what); at != text.npos; at = text.find(what, at + by.size()))
      text.replace(at, what.size(), by);
  return text;
}

/// The rows of the table at a glance, one for each op, pass and dtype, and its cells with a number,
/// one for each of those on each device.
std::pair<std::size_t, std::size_t> rows_and_cells_at_a_glance(const json& records) {
  std::set<std::string> rows, cells;
  for (const json& record : records) {
    const std::string layer = record["layer"];
    const std::string row = record["op"].get<std::string>() + " " +
                            layer.substr(0, layer.find(' ', layer.find(' ') + 1));
    rows.insert(row);
    cells.insert(row + record["device"].get<std::string>());
  }
  return {rows.size(), cells.size()};
}

json look(const Sandbox& sandbox, const std::string& program, std::string page, const View& view) {
  replace(page, "</body>", std::string(probe) + "</body>");
  write_text(sandbox.folder() / "probed.html", page);
  write_text(sandbox.folder() / "window.html", window_page(view.width));
  Process process(
      {program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
       "--user-data-dir=" + (sandbox.folder() / "browser").string(), "--window-size=1280,900",
       std::string("--blink-settings=preferredColorScheme=") + (view.dark ? "0" : "1"),
       "--virtual-time-budget=20000", "--dump-dom",
       "file://" + (sandbox.folder() / "window.html").string()},
      {"HOME=" + sandbox.folder().string(), "PATH=/usr/bin:/bin"}, sandbox.folder());
  const Finished done = process.wait();
  const std::string start = "<pre id=\"seen\">";
  const std::size_t begin = done.out.find(start);
  INFO(done.err);
  REQUIRE(begin != done.out.npos);
  const std::size_t end = done.out.find("</pre>", begin);
  return json_of(unescaped(done.out.substr(begin + start.size(), end - begin - start.size())));
}

}  // namespace

TEST_CASE("the report of all presets is one small file that asks for nothing else") {
  const Sandbox sandbox;
  const auto page = report(sandbox, preset_folder.string());
  if (!page) FFTUNE_SKIP("this build has no Chart.js");
  CHECK(page->size() < 3'000'000);
  CHECK(page->find("<link") == page->npos);
  CHECK(page->find(" src=") == page->npos);
  CHECK(page->find("@import") == page->npos);
  CHECK(page->find("Number(\"1.05\")") != page->npos);  // most_share_of_limit
  const json data = data_of(*page);
  std::size_t records = 0;
  for (const auto& entry : fs::recursive_directory_iterator(preset_folder))
    if (entry.is_regular_file() && entry.path().filename() != "schema.json")
      records += json_of(text_of(entry.path()))["records"].size();
  CHECK(data["records"].size() == records);
  // The command that searches again names the problem, and the tool takes it.
  const std::string command = data["records"][0]["command"];
  CHECK(sandbox.fftune(command.substr(7) + " --help").code == 0);
}

TEST_CASE("records of one problem are compared with the first") {
  const Sandbox sandbox;
  for (const auto& [folder, us] : std::vector<std::pair<std::string, double>>{
           {"a", 100}, {"b", 80}, {"c", 130}, {"d", 100.2}}) {
    fs::create_directories(sandbox.folder() / folder);
    write_text(sandbox.folder() / folder / "ffn.json", preset_text("Device " + folder, us));
  }
  const auto page = report(sandbox, "a/ffn.json b/ffn.json c/ffn.json d/ffn.json");
  if (!page) FFTUNE_SKIP("this build has no Chart.js");
  const json compared = data_of(*page)["comparisons"];
  REQUIRE(compared.size() == 3);
  CHECK(compared[0]["verdict"] == "FASTER");
  CHECK(compared[1]["verdict"] == "SLOWER");
  CHECK(compared[2]["verdict"] == "SAME");
  for (const json& each : compared) CHECK(each["before"] == 0);
}

TEST_CASE("a journal tells how the search went and why variants failed") {
  const Sandbox sandbox;
  const std::string problem = R"(,"problem":"ffn/fwd bf16 act=silu d=32 h=64 m=1","sources":"x",)";
  const auto line = [&](const std::string& id, const std::string& rest, double seconds) {
    return R"({"first_stage":0,"id":")" + id +
           R"(","registers":8,"compile_seconds":1,"cached":false,"error":0)" + problem +
           "\"seconds\":" + std::to_string(seconds) + "," + rest + "}\n";
  };
  const auto time = [](double us) {
    return R"("kind":"measured","us":{"samples":3,"median":)" + std::to_string(us) +
           R"(,"low":1,"high":2})";
  };
  write_text(
      sandbox.folder() / "ffn-1.jsonl",
      R"({"fftune":"0.1.0","device":"D","driver":"1","toolkit":"2"})"
      "\n" +
          line("ffn_decode/rows=1,x=1", time(20), 1) + line("ffn_decode/rows=2,x=1", time(30), 2) +
          line("ffn_decode/rows=2,x=2", time(10), 4) +
          line("ffn_decode/rows=4,x=2", R"("kind":"compile_failed","reason":"needs 12 KiB")", 5) +
          line("ffn_decode/rows=8,x=2", R"("kind":"compile_failed","reason":"needs 24 KiB")", 6));
  const auto searches =
      fftune::tool::summarise_journal(sandbox.folder() / "ffn-1.jsonl", fftune::builtin_catalog());
  REQUIRE(searches.size() == 1);
  REQUIRE(searches[0].groups.size() == 1);
  const auto& group = searches[0].groups[0];
  CHECK(group.stages == "gate_up+down");
  REQUIRE(group.best.size() == 2);
  CHECK(group.best[1].microseconds == 10);
  CHECK(group.best[1].seconds == 4);
  CHECK(group.best[1].variants == 3);
  CHECK(group.winner == "ffn_decode/rows=2,x=2");
  const auto& rows = group.parameters.at("rows");
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].value == "2");
  CHECK(rows[0].best_us == 10);
  CHECK(rows[1].best_us == 20);
  REQUIRE(group.failures.size() == 1);
  CHECK(group.failures[0].count == 2);
  CHECK(group.failures[0].reason == "needs 12 KiB");
}

TEST_CASE("a file that is no preset, journal or bench result is refused by name") {
  const Sandbox sandbox;
  write_text(sandbox.folder() / "empty.jsonl", "");
  write_text(sandbox.folder() / "word.json", "no");
  fs::create_directories(sandbox.folder() / "hollow");
  write_text(
      sandbox.folder() / "bench.json",
      R"({"device": {"name": 5}, "problems": [{"problem": {"op": "ffn", "m": 1, "d": 8, "h": 8},
             "entries": [{"name": "fftune", "median_us": "x"}]}]})");
  for (const std::string name : {"empty.jsonl", "word.json", "bench.json", "hollow", "absent"}) {
    const Finished done = sandbox.fftune("report " + name);
    CHECK(done.code == 2);
    CHECK(done.err.find(name) != done.err.npos);
    CHECK(lines_in(done.err) == 1);
  }
}

TEST_CASE("a browser draws every chart, in light and dark, narrow and wide") {
  const Sandbox sandbox;
  const std::vector<std::string> programs = browsers_here(sandbox);
  if (programs.empty()) FFTUNE_SKIP("no chromium, chromium-headless-shell or google-chrome here");
  for (const auto& [folder, us] :
       std::vector<std::pair<std::string, double>>{{"before", 100}, {"after", 80}}) {
    fs::create_directories(sandbox.folder() / folder);
    write_text(sandbox.folder() / folder / "x.json", preset_text("<b>Device</b>", us));
  }
  const auto page = report(sandbox, preset_folder.string() + " before/x.json after/x.json");
  if (!page) FFTUNE_SKIP("this build has no Chart.js");
  const auto glance = rows_and_cells_at_a_glance(data_of(*page)["records"]);
  for (const std::string& program : programs)
    for (const View view :
         {View{1280, false}, View{1280, true}, View{400, false}, View{400, true}}) {
      CAPTURE(program, view.width, view.dark);
      const json seen = look(sandbox, program, *page, view);
      CHECK(seen["windowWidth"] == view.width);
      CHECK(seen["charts"].size() > 10);
      for (const json& chart : seen["charts"]) {
        CAPTURE(chart["label"].get<std::string>());
        CHECK(chart["drawn"] > 500);
        CHECK(!chart["series"].empty());
        CHECK(chart["role"] == "img");
        CHECK(chart["focusable"] == true);
        CHECK(chart["width"] <= view.width);
      }
      CHECK(!seen["said"].get<std::string>().empty());
      CHECK(seen["pageWidth"] <= seen["windowWidth"]);
      // A bar of each device, in colours of their own.
      const auto colours = seen["charts"][0]["series"].get<std::set<std::string>>();
      for (const char* colour : {"--series-0", "--series-1", "--series-2"})
        CHECK(colours.contains(colour));
      CHECK(seen["glance"]["rows"] == glance.first);
      CHECK(seen["glance"]["links"] == glance.second);
      CHECK(seen["glance"]["lost"] == 0);
      CHECK(seen["glance"]["words"].get<std::string>().find("% on NVIDIA H200") !=
            std::string::npos);
      // The devices share one problem of this row: it alone counts, and so there is no range.
      const std::string words = seen["glance"]["words"];
      const std::size_t row = words.find("ffn bwd bf16: ");
      REQUIRE(row != words.npos);
      CHECK(words.substr(row, words.find(';', row) - row).find(") on NVIDIA H200") == words.npos);
      CHECK(seen["unlabelled"] == 0);
      CHECK(seen["injected"] == 0);
      const std::string light = "rgb(255, 255, 255)";
      CHECK((seen["ground"] == light) == !view.dark);
      CHECK((seen["otherGround"] == light) == view.dark);
    }
}
