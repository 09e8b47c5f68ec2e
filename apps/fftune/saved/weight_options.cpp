#include "apps/fftune/saved/weight_options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/problem_options.hpp"
#include "core/fail.hpp"

namespace fftune::tool {

void add_weight_options(Command& command, WeightOptions& values) {
  const char* group = "Saved values";
  // An option of ffn and others is called weights too.
  const bool has_own = command.find("--weights") != nullptr;
  command.option(has_own ? "--saved-weights PATH" : "--weights,--saved-weights PATH",
                 values.weights,
                 fmt::format("take the weights, and the sizes that are not given, from a saved "
                             "model: a .safetensors file, or a folder of them with or without an "
                             "index{}",
                             has_own ? "; --weights PATH is the same where PATH is none of the "
                                       "formats of --weights above"
                                     : ""),
                 group);
  command.option("--layer N", values.layer, "layer of the saved model (default: 0)", group);
  command.option("--input FILE", values.input,
                 "take other inputs, such as x, from a .safetensors file that has them by the "
                 "op's names; its rows repeat where there are more tokens",
                 group);
  command.option("--map LIST", values.map,
                 "the saved tensor of an input, as in w=mlp.up_proj.weight: a whole name, or the "
                 "part behind the layer's number; with ^T if it is saved as [in, out]",
                 group);
}

void take_saved_weights(const Op& op, ProblemOptions& problem, WeightOptions& values) {
  const auto given = problem.options.find("weights");
  if (given == problem.options.end() || given->second.empty()) return;
  std::string& word = given->second;
  for (const OptionField& field : op.options()) {
    if (field.name != "weights") continue;
    if (std::find(field.choices.begin(), field.choices.end(), word) != field.choices.end()) return;
    std::error_code unreadable;
    if (!std::filesystem::exists(word, unreadable))
      fail(
          "--weights '{}' is neither one of {} nor the path of a saved model: there is no such "
          "path",
          word, fmt::join(field.choices, ", "));
  }
  if (!values.weights.empty())
    fail("--weights {} and --saved-weights {} are two saved models: give one", word,
         values.weights);
  values.weights = std::exchange(word, {});
}

void check_weight_options(const WeightOptions& values) {
  if (!values.layer.empty() && values.weights.empty())
    fail("--layer is of a saved model: give --saved-weights too");
  if (!values.map.empty() && !values.given())
    fail("--map is of saved tensors: give --saved-weights or --input too");
}

}  // namespace fftune::tool
