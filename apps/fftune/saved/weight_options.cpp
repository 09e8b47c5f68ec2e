#include "apps/fftune/saved/weight_options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/values.hpp"
#include "core/fail.hpp"

namespace fftune::tool {

void add_weight_options(Command& command, SavedValues& values) {
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
  command.option("--layer N", Reader([&values](const std::string& text, const std::string& where) {
                   values.layer = parse_whole(text, where, 0, most_layers);
                 }),
                 "layer of the saved model (default: 0)", group);
  command.option("--input FILE", values.input,
                 "take other inputs, such as x, from a .safetensors file that has them by the "
                 "op's names; its rows repeat where there are more tokens",
                 group);
  command.option("--map LIST", values.map,
                 "the saved tensor of an input, as in w=mlp.up_proj.weight: a whole name, or the "
                 "part behind the layer's number; with ^T if it is saved as [in, out]",
                 group);
}

void take_saved_weights(const Op& op, ProblemOptions& problem, SavedValues& values) {
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

void check_weight_options(const SavedValues& values) {
  if (values.layer && values.weights.empty())
    fail("--layer is of a saved model: give --saved-weights too");
  if (!values.map.empty() && !values.given())
    fail("--map is of saved tensors: give --saved-weights or --input too");
}

std::vector<std::string> words_of(const SavedInputs& saved) {
  const SavedValues& values = saved.values();
  std::vector<std::string> words{"--op", std::string(saved.op().name())};
  for (const auto& [name, value] :
       {std::pair("--saved-weights", values.weights),
        {"--layer", values.layer ? fmt::format("{}", *values.layer) : ""},
        {"--input", values.input},
        {"--map", values.map}})
    if (!value.empty()) words.insert(words.end(), {name, value});
  return words;
}

std::unique_ptr<const SavedInputs> saved_inputs(const Catalog& catalog, const Op& op,
                                                ProblemOptions& problem, SavedValues values) {
  take_saved_weights(op, problem, values);
  check_weight_options(values);
  if (!values.given()) return nullptr;
  return std::make_unique<const SavedInputs>(catalog, op, std::move(values));
}

std::vector<Problem> saved_problems(const Op& op, const ProblemOptions& given,
                                    const SavedInputs* saved, DeviceKind kind) {
  if (saved == nullptr) return problems_of(op, given, Sizes::required, kind);
  saved->require_any();
  ProblemOptions own = given;
  saved->complete(own, kind);
  const auto problems = problems_of(op, own, Sizes::required, kind);
  for (const Problem& problem : problems) saved->require_fit(problem);
  return problems;
}

}  // namespace fftune::tool
