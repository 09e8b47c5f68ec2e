// The promises of the pages: links that lead somewhere, every column, every variable.
#include <algorithm>
#include <cctype>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "registry/catalog.hpp"
#include "sandbox.hpp"
#include "support/catch.hpp"

using namespace fftune::testing;

namespace {

namespace fs = std::filesystem;

const fs::path root = FFTUNE_SOURCE_DIR;

std::vector<fs::path> pages() {
  std::vector<fs::path> found{root / "README.md", root / "CONTRIBUTING.md", root / "CHANGELOG.md"};
  for (const auto& entry : fs::recursive_directory_iterator(root / "docs"))
    if (entry.path().extension() == ".md") found.push_back(entry.path());
  return found;
}

std::set<std::string> matches(const std::string& text, const std::string& pattern) {
  const std::regex expression(pattern);
  std::set<std::string> found;
  for (std::sregex_iterator each(text.begin(), text.end(), expression), end; each != end; ++each)
    found.insert((*each)[1]);
  return found;
}

/// The page without its code blocks, in which brackets are no links.
std::string prose(const std::string& page) {
  std::istringstream lines(page);
  std::string text;
  bool code = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("```", 0) == 0)
      code = !code;
    else if (!code)
      text += line + "\n";
  }
  return text;
}

/// The headings as GitHub links to them: lower case, words joined by '-', no other signs.
std::set<std::string> anchors(const std::string& page) {
  std::set<std::string> found;
  for (const std::string& heading : matches("\n" + prose(page), "\n#+ ([^\n]*)")) {
    std::string anchor;
    for (const char letter : heading) {
      const auto code = static_cast<unsigned char>(letter);
      if (std::isalnum(code) || letter == '-' || letter == '_' || code >= 0x80)
        anchor += static_cast<char>(std::tolower(code));
      else if (letter == ' ')
        anchor += '-';
    }
    found.insert(anchor);
  }
  return found;
}

}  // namespace

TEST_CASE("every link of the pages leads to a file, and to a heading in it") {
  std::size_t links = 0;
  for (const fs::path& page : pages())
    for (const std::string& link : matches(prose(text_of(page)), R"(\]\(([^)\s]+)\))")) {
      if (link.find("://") != link.npos) continue;
      const std::size_t hash = link.find('#');
      const std::string path = link.substr(0, hash);
      const fs::path target = path.empty() ? page : page.parent_path() / path;
      CAPTURE(page.string(), link);
      CHECK(fs::exists(target));
      if (hash != link.npos && target.extension() == ".md")
        CHECK(anchors(text_of(target)).contains(link.substr(hash + 1)));
      ++links;
    }
  CHECK(links > 50);
}

TEST_CASE("the README counts and lists every op, and those without a backward pass") {
  const std::string page = text_of(root / "README.md");
  const auto& ops = fftune::builtin_catalog().ops;
  const std::string count = std::to_string(ops.size()) + " ops";
  CHECK(page.find("[" + count + "](#operations)") != std::string::npos);
  const std::size_t begin = page.find("\n## Operations\n");
  REQUIRE(begin != std::string::npos);
  const std::string list = page.substr(begin, page.find("\n## ", begin + 1) - begin);
  CHECK(list.find("\n" + count + ".") != std::string::npos);
  std::set<std::string> forward;
  for (const fftune::Op* op : ops) {
    const std::string name(op->name());
    CAPTURE(name);
    const std::size_t listed = list.find("`" + name + "`");
    REQUIRE(listed != std::string::npos);
    const bool dagger = list.compare(listed + name.size() + 2, 4, " †") == 0;
    CHECK(dagger == (op->passes().size() == 2));
    if (op->passes().size() == 1) forward.insert(name);
  }
  const std::string lead = "All ops have a forward and a backward pass, except ";
  const std::size_t except = page.find(lead);
  REQUIRE(except != std::string::npos);
  const std::size_t names = except + lead.size();
  const std::string sentence = page.substr(names, page.find('.', names) - names);
  CHECK(matches(sentence, "`([a-z-]+)`") == forward);
}

TEST_CASE("docs/index.md leads to every page of docs") {
  const std::string index = text_of(root / "docs/index.md");
  std::size_t named = 0;
  for (const auto& entry : fs::directory_iterator(root / "docs")) {
    const std::string name = entry.path().filename().string();
    if (entry.path().extension() != ".md" || name == "index.md") continue;
    CAPTURE(name);
    CHECK(index.find("](" + name) != std::string::npos);
    ++named;
  }
  CHECK(named > 15);
}

TEST_CASE("every raw file of the measurements is linked from a page") {
  std::set<fs::path> linked;
  for (const fs::path& page : pages())
    for (const std::string& link : matches(prose(text_of(page)), R"(\]\(([^)\s#]+))"))
      linked.insert((page.parent_path() / link).lexically_normal());
  std::size_t files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(root / "docs/measurements")) {
    if (!entry.is_regular_file() || entry.path().extension() == ".md") continue;
    CAPTURE(entry.path().string());
    CHECK(linked.contains(entry.path().lexically_normal()));
    ++files;
  }
  CHECK(files > 30);
}

TEST_CASE("every source file that a page names is there") {
  std::string files = "\n";
  for (const char* folder :
       {"apps", "bench", "docs", "kernels", "lib", "python", "tests", "tuning"})
    for (const auto& entry : fs::recursive_directory_iterator(root / folder))
      files += "/" + fs::relative(entry.path(), root).string() + "\n";
  // A build without Python leaves out files that others write into the tree.
  files += text_of(root / ".gitignore");
  std::size_t named = 0;
  for (const fs::path& page : pages()) {
    // Records of what was tried name what was there at that time.
    if (page.string().find("/measurements/") != std::string::npos) continue;
    for (const std::string& file :
         matches(prose(text_of(page)), R"(`([\w./-]+\.(?:cpp|hpp|h|cu|cuh|inc|py))`)")) {
      CAPTURE(page.string(), file);
      CHECK(files.find("/" + file + "\n") != std::string::npos);
      ++named;
    }
  }
  CHECK(named > 100);
}

TEST_CASE("docs/environment.md has every variable that is read") {
  const std::string page = text_of(root / "docs/environment.md");
  std::set<std::string> variables =
      matches(text_of(root / "lib/runtime/environment.cpp"), R"re("([A-Z][A-Z_]{3,})")re");
  for (const auto& entry : fs::recursive_directory_iterator(root / "python/fftune"))
    if (entry.path().extension() == ".py")
      variables.merge(matches(text_of(entry.path()), R"re(environ(?:\.get\(|\[)"([A-Z_]+)")re"));
  REQUIRE(variables.contains("FFTUNE_CACHE"));
  REQUIRE(variables.contains("FFTUNE_DISABLE"));
  REQUIRE(variables.contains("FFTUNE_VLLM"));
  for (const std::string& variable : variables) {
    CAPTURE(variable);
    CHECK(page.find("`" + variable + "`") != std::string::npos);
  }
}

TEST_CASE("docs/output.md has every column of the tables that people read most") {
  const Sandbox sandbox;
  REQUIRE_FALSE(sandbox.tuned("1").empty());
  const std::string page = text_of(root / "docs/output.md");
  const std::vector<std::string> commands{
      "ffn --d 32 --h 64 --m 1 --device cpu --budget 4s --max-variants 4",
      "bench ffn --d 32 --h 64 --m 1 --device cpu --samples 3 --budget 1s",
      "check --device cpu --presets presets",
      "list ffn --d 32 --h 64 --m 1 --device cpu",
      "presets show presets",
      "presets diff presets " + (root / "presets").string()};
  for (const std::string& words : commands) {
    std::istringstream lines(sandbox.fftune(words).out);
    std::string header;
    // The first line with several columns.
    while (std::getline(lines, header) && header.find("  ") == header.npos) {
    }
    CAPTURE(words, header);
    std::size_t columns = 0;
    for (const std::string& column : matches("  " + header + "  ", R"(  +(\S+(?: \S+)*)(?=  ))")) {
      CAPTURE(column);
      CHECK(page.find(column) != std::string::npos);
      ++columns;
    }
    CHECK(columns >= 5);
  }
}

TEST_CASE("what a page quotes is current: help, an output, a header") {
  // "```text SOURCE" and the lines up to the end of the block. SOURCE is a command or a file.
  const std::regex excerpt(R"re(\n```text ([^\n]+)\n([^`]*)```)re");
  const Sandbox sandbox;
  std::size_t quoted = 0;
  for (const fs::path& page : pages()) {
    const std::string text = text_of(page);
    for (std::sregex_iterator each(text.begin(), text.end(), excerpt), end; each != end; ++each) {
      const std::string source = (*each)[1];
      const std::string now = source.rfind("fftune ", 0) == 0 ? sandbox.fftune(source.substr(7)).out
                                                              : text_of(root / source);
      std::istringstream lines((*each)[2]);
      std::size_t from = 0;  // where the next line is looked for: behind those before
      for (std::string line; std::getline(lines, line);) {
        if (line == "…") continue;
        CAPTURE(page.string(), source, line);
        const std::size_t at = ("\n" + now).find("\n" + line + "\n", from);
        CHECK(at != now.npos);
        if (at != now.npos) from = at + line.size();
      }
      ++quoted;
    }
  }
  CHECK(quoted >= 2);
}

TEST_CASE("docs/tutorial.md shows the columns of the tables that its commands print") {
  const std::string page = text_of(root / "docs/tutorial.md");
  // "$ fftune WORDS" and the lines up to the next command or the end of the block.
  const std::regex command(R"re(\n\$ (fftune [^\n]+)((?:\n(?!\$ |```)[^\n]*)*))re");
  const Sandbox sandbox;
  std::size_t run = 0, titles = 0;
  for (std::sregex_iterator each(page.begin(), page.end(), command), end; each != end; ++each) {
    std::string words = (*each)[1].str().substr(7);
    const std::string shown = (*each)[2];
    const std::size_t into = words.find(" > ");
    const std::string file = into == words.npos ? "" : words.substr(into + 3);
    words = words.substr(0, into);
    for (const auto& [long_one, short_one] :
         {std::pair<std::string, std::string>{"--budget 40s", "--budget 4s --wait 0s"},
          {"~", sandbox.folder().string()}})
      if (const std::size_t at = words.find(long_one); at != words.npos)
        words.replace(at, long_one.size(), short_one);
    if (words.rfind("bench", 0) == 0) words += " --budget 1s";
    CAPTURE(words, shown);
    const Finished done = sandbox.fftune(words);
    CAPTURE(done.out, done.err);
    CHECK(done.code <= 1);  // `bench --against` may find something slower on a busy machine
    if (!file.empty()) write_text(sandbox.folder() / file, done.out);
    ++run;
    // A table's titles are several cells of words alone, below a line that has no cells.
    // An output that begins with dots has the last table alone.
    const bool cut = shown.rfind("\n…", 0) == 0;
    std::istringstream lines(cut ? done.out.substr(done.out.rfind("\n\n")) : done.out);
    bool above = false;
    for (std::string line; std::getline(lines, line);) {
      if (const std::size_t at = line.find("95%"); at != line.npos) line.replace(at, 3, "   ");
      static const std::regex title(R"([^\d-]*\S  +[^\d-]*\S  +[^\d-]*)");
      const bool first =
          !std::exchange(above, line.find("  ", line.find_first_not_of(' ')) != line.npos);
      if (!file.empty() || !first || !std::regex_match(line, title)) continue;
      std::istringstream cells(line);
      for (std::string word; cells >> word; ++titles) {
        CAPTURE(line, word);
        CHECK(shown.find(word) != shown.npos);
      }
    }
  }
  CHECK(run == 9);
  CHECK(titles >= 40);
}
