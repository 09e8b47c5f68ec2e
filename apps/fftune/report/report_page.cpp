#include "apps/fftune/report/report_page.hpp"

#include <map>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/error.hpp"

namespace fftune {

std::map<std::string, std::string> embedded_page();      // report.html, report.css, report.js
std::map<std::string, std::string> embedded_chart_js();  // empty if the build found none

}  // namespace fftune

namespace fftune::tool {

namespace {

/// No text of it ends the script element that it stands in, or begins a comment there.
std::string as_script(const Json& data) {
  std::string text;
  for (const char letter : data.dump(-1, ' ', false, Json::error_handler_t::replace))
    if (letter == '<')
      text += "\\u003c";
    else
      text += letter;
  return text;
}

void put(std::string& page, std::string_view place, const std::string& text) {
  const std::size_t at = page.find(place);
  if (at == page.npos)
    throw Error(ErrorKind::internal, "the report's page has no place for " + std::string(place));
  page.replace(at, place.size(), text);
}

}  // namespace

std::string report_page(const Json& data) {
  const auto chart_js = embedded_chart_js();
  if (chart_js.empty())
    throw Error(ErrorKind::unavailable,
                "this fftune was built without Chart.js, which draws the report: install "
                "libjs-chart.js (or give FFTUNE_CHART_JS to CMake), configure and build again");
  auto files = embedded_page();
  std::string page = files.at("report.html");
  // The data last: whatever it holds is not taken for a place.
  put(page, "/*report.css*/", files.at("report.css"));
  put(page, "/*chart.js*/", chart_js.begin()->second);
  put(page, "/*report.js*/", files.at("report.js"));
  put(page, "/*data*/", as_script(data));
  return page;
}

}  // namespace fftune::tool
