// Ranks of a group as threads of this process, each with a context of its own.
#include <fmt/format.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "api/layer.hpp"
#include "store/preset_file.hpp"
#include "support/on_threads.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

std::string problem_of(int ranks, const std::string& link = "peers") {
  return fmt::format(
      R"({{"op":"all-reduce","dtype":"f32","m":3,"d":64,"ranks":{},"norm":"t5","link":"{}"}})",
      ranks, link);
}

/// The text that each rank's call of `work` returned, or that of its exception.
template <typename Work>
std::vector<std::string> on_ranks(int ranks, const Work& work) {
  static int groups = 0;
  const std::string name = fmt::format("api-{}-{}", ::getpid(), groups++);
  return on_threads(ranks, [&](int rank) {
    const library::Context context(-1);
    fftune_group_options options{};
    options.name = name.c_str();
    options.rank = rank;
    options.ranks = ranks;
    options.max_bytes = 4096;
    const auto group = context.group(options);
    return work(context, group);
  });
}

}  // namespace

TEST_CASE("ranks that are threads tune, and later contexts load the record that rank 0 wrote") {
  const testing::TemporaryFolder folder;
  const int ranks = 3;
  const auto recipes = on_ranks(ranks, [&](const auto& context, const auto& group) {
    group.tune(problem_of(ranks), 50, folder.path().c_str());
    group.check();
    return std::string(context.plan(problem_of(ranks)).describe());
  });
  for (const std::string& own : recipes) {
    CHECK(has(own, "a search on the ranks of a group"));
    CHECK(own == recipes.front());
  }
  const auto files = read_preset_folder(folder.path());
  REQUIRE(files.size() == 1);
  CHECK(files.front().complaints.empty());
  CHECK(files.front().records.size() == 1);
  const library::Context later(-1, folder.path().c_str());
  const std::string loaded(later.plan(problem_of(ranks)).describe());
  CHECK(has(loaded, (folder.path() / "").string()));
  CHECK(has(loaded, "\"exact_shape\": true"));
}

TEST_CASE("a search on ranks that cannot be is one line on every rank") {
  const auto all_have = [](const std::vector<std::string>& lines, const std::string& words) {
    for (const std::string& line : lines) {
      CAPTURE(line);
      CHECK(has(line, words));
    }
  };
  all_have(on_ranks(2,
                    [](const auto&, const auto& group) {
                      group.tune(problem_of(2, "loopback"), 50);
                      return std::string();
                    }),
           "is no problem of a group: give link=peers and all sizes");
  all_have(on_ranks(2,
                    [](const auto&, const auto& group) {
                      group.tune(problem_of(3), 50);
                      return std::string();
                    }),
           "ranks=3, and the group has 2: give the problem of this group");
  all_have(on_ranks(2,
                    [](const auto&, const auto& group) {
                      group.tune(problem_of(2), 50, "");
                      return std::string();
                    }),
           "preset_path is empty: give a folder, or NULL");
  all_have(on_ranks(2,
                    [](const auto&, const auto& group) {
                      group.tune(problem_of(2), -1);
                      return std::string();
                    }),
           "the budget is -1 ms: give 0 or more");
  const testing::TemporaryFolder folder;
  all_have(on_ranks(2,
                    [&](const auto&, const auto& group) {
                      group.tune(problem_of(2), 50,
                                 group.rank() == 1 ? nullptr : folder.path().c_str());
                      return std::string();
                    }),
           "give all ranks the same");
  CHECK(read_preset_folder(folder.path()).empty());
}
