// The table of the Python package: the conditions of buffers, by hand and beside the registry.

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "apps/fftune/inspect/ops.hpp"
#include "measure/statistics.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "support/json.hpp"

using namespace fftune;
using namespace fftune::tool;
using fftune::testing::json_of;

namespace {

struct Row {
  std::string name, role, dtype;
  std::vector<std::uint64_t> values;     // of each axis, a bit for each; none: any
  std::vector<std::int64_t> shape = {};  // where the row was first met

  bool holds(const Choice& choice) const {
    for (std::size_t i = 0; i < choice.size(); ++i)
      if (values[i] != 0 && (values[i] >> choice[i] & 1) == 0) return false;
    return true;
  }
};

/// The rows of a pass beside what the registry says of problems.
class Rows {
 public:
  Rows(const Op& op, const std::string& pass, const nlohmann::json& table)
      : op_(op), usual_(usual_form(op, pass)), axes_(axes_of(op, pass)) {
    for (const auto& row : table) {
      rows_.push_back({row[0], row[1], row[2], std::vector<std::uint64_t>(axes_.size())});
      for (std::size_t i = 0; i < axes_.size(); ++i)
        for (const std::string value : row[4].value(axes_[i].name, nlohmann::json::array()))
          rows_.back().values[i] |= std::uint64_t{1} << place_of(value, axes_[i]);
    }
  }

  /// Pairs of values beside random choices that the op takes: those of three values and more.
  void compare() {
    std::uint64_t state = 1;
    for (int n = 0; n < 12; ++n) {
      const Choice choice = random_choice(state);
      compare(choice);
      for (std::size_t i = 0; i < axes_.size(); ++i)
        for (std::size_t j = 0; j <= i; ++j)
          for (std::size_t a = 0; a < axes_[i].values.size(); ++a)
            for (std::size_t b = 0; b < axes_[j].values.size(); ++b) {
              Choice with = choice;
              with[j] = static_cast<std::uint8_t>(b);
              with[i] = static_cast<std::uint8_t>(a);
              compare(with);
            }
    }
  }

  int compared() const { return compared_; }
  const std::vector<std::string>& wrong() const { return wrong_; }

 private:
  static std::size_t place_of(const std::string& value, const Axis& axis) {
    const auto found = std::find(axis.values.begin(), axis.values.end(), value);
    REQUIRE(found != axis.values.end());
    return static_cast<std::size_t>(found - axis.values.begin());
  }

  /// Whether the op takes such a problem, with sizes that go together: equal powers of two.
  bool takes(Problem problem) const {
    for (const SizeField& field : op_.sizes())
      if (const auto size = problem.sizes.find(field.name); size != problem.sizes.end())
        size->second = field.max > 1024 ? 4096 : std::min<std::int64_t>(field.max, 64);
    // As in the canonical form.
    for (const OptionField& field : options_of(op_, problem.pass))
      if (field.rare && problem.options.at(field.name) == field.choices.front())
        problem.options.erase(field.name);
    return op_.contradiction(problem).empty();
  }

  /// About half of all values, each as far as the op takes it beside those before it. Twice, for
  /// those that need a later one.
  Choice random_choice(std::uint64_t& state) const {
    Choice choice(axes_.size());
    for (std::size_t n = 0; n < 2 * axes_.size(); ++n) {
      const std::size_t i = n % axes_.size();
      const std::uint64_t drawn = next_random(state);
      if (choice[i] != 0 || drawn % 2 == 0) continue;
      choice[i] = static_cast<std::uint8_t>((drawn >> 8) % axes_[i].values.size());
      if (!takes(problem_of(op_, usual_, axes_, choice))) choice[i] = 0;
    }
    return choice;
  }

  void compare(const Choice& choice) {
    const Problem problem = problem_of(op_, usual_, axes_, choice);
    if (!takes(problem)) return;
    ++compared_;
    std::string said, has;
    auto row = rows_.begin();
    for (const TensorSpec& tensor : op_.tensors(problem)) {
      if (tensor.role == Role::intermediate) continue;
      row = std::find_if(row, rows_.end(), [&](const Row& one) { return one.holds(choice); });
      has += fmt::format(" {}", tensor.name);
      if (row == rows_.end()) break;
      said += fmt::format(" {}", row->name);
      if (row->shape.empty()) row->shape = tensor.shape;
      const bool same = row->name == tensor.name && row->role == role_name(tensor.role) &&
                        row->shape == tensor.shape &&
                        (row->dtype == "T" ? tensor.dtype == problem.dtype
                                           : row->dtype == dtype_name(tensor.dtype));
      if (!same) said += "!";
      ++row;
    }
    for (; row != rows_.end(); ++row)
      if (row->holds(choice)) said += fmt::format(" {}", row->name);
    if (said != has)
      wrong_.push_back(
          fmt::format("{}:\n the registry has{}\n the table has{}", problem.text(), has, said));
  }

  const Op& op_;
  Problem usual_;
  std::vector<Axis> axes_;
  std::vector<Row> rows_;
  int compared_ = 0;
  std::vector<std::string> wrong_;
};

}  // namespace

TEST_CASE("the table of the Python package tells with which options a buffer is there") {
  const auto table = json_of(op_table(builtin_catalog()));
  const auto has = [&](const char* op, const char* pass, const char* row) {
    const auto& rows = table.at(op).at(pass);
    const auto wanted = json_of(row);
    return std::find(rows.begin(), rows.end(), wanted) != rows.end();
  };
  // By hand, from the documentation of the ops.
  CHECK(has("ffn", "fwd", R"(["b_up", "input", "T", ["h"], {"bias": ["both"]}])"));
  CHECK(has("rmsnorm", "fwd", R"(["w", "input", "f32", ["d"], {"weights": ["f32"]}])"));
  CHECK(has("linear", "bwd",
            R"(["dbias_before", "input", "T", ["n"], {"bias": ["yes"], "accumulate": ["yes"]}])"));
  CHECK(has("moe-ffn", "bwd",
            R"(["b_down", "input", "T", ["experts", "d"],
                {"shared": [""], "own-experts": [""], "weigh": ["after"], "bias": ["all"]}])"));
  CHECK(has("moe-ffn", "bwd",
            R"(["b_down", "input", "T", ["own-experts", "d"],
                {"own-experts": ["given"], "weigh": ["after"], "bias": ["all"]}])"));
  // Two of three conditions, each by itself: a row for each of them.
  CHECK(has("ffn", "bwd", R"(["x", "input", "T", ["m", "d"], {"save": ["input"]}])"));
  CHECK(has("ffn", "bwd",
            R"(["x", "input", "T", ["m", "d"], {"save": ["preact"], "frozen": ["no"]}])"));

  for (const Op* op : builtin_catalog().ops)
    for (const std::string& pass : op->passes()) {
      if (!table.contains(std::string(op->name()))) continue;
      Rows rows(*op, pass, table.at(std::string(op->name())).at(pass));
      rows.compare();
      INFO(op->name() << " " << pass << ": " << rows.wrong().size() << " of " << rows.compared());
      if (!rows.wrong().empty()) FAIL_CHECK(rows.wrong().front());
      CHECK(rows.compared() > 0);
    }
}
