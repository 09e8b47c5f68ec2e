// What a layer is made of: problems of other ops, and what their tensors are called here.
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/attention.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/qkv/qkv.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"

namespace fftune::layer {
namespace {

using Names = std::map<std::string, std::string>;

constexpr const char* usual_eps = "1e-06";

std::int64_t size_or(const Problem& problem, const char* name, std::int64_t otherwise) {
  const auto entry = problem.sizes.find(name);
  return entry == problem.sizes.end() ? otherwise : entry->second;
}

std::string option_or(const Problem& problem, const char* name, const char* otherwise) {
  const auto entry = problem.options.find(name);
  return entry == problem.options.end() ? otherwise : entry->second;
}

class Parts {
 public:
  explicit Parts(const Problem& problem)
      : problem_(problem),
        tokens_(problem.size("batch") * size_or(problem, "s", 1)),
        post_norms_(problem.has("post-norms", "yes")) {}

  std::vector<OpPart> all() {
    add_norm("attn_norm", {{"x", "x"}, {"w", "attn_norm"}, {"y", "normalised"}});
    add_qkv();
    add_attention();
    add_out();
    add_ffn();
    return std::move(parts_);
  }

 private:
  void add(const char* name, const Op& op, std::map<std::string, std::int64_t> sizes,
           std::map<std::string, std::string> options, Names names) {
    // The kind of device decides about dtypes alone: those that CUDA has not, no op has.
    parts_.push_back({name, &op,
                      canonical(op,
                                {std::string(op.name()), "fwd", problem_.dtype, std::move(sizes),
                                 std::move(options)},
                                DeviceKind::cuda),
                      std::move(names)});
  }

  void add_norm(const char* name, Names names) {
    add(name, rmsnorm_op(), {{"m", tokens_}, {"d", problem_.size("d")}},
        {{"convention", option_or(problem_, "convention", "llama")},
         {"eps", option_or(problem_, "eps", usual_eps)}},
        std::move(names));
  }

  void add_qkv() {
    std::map<std::string, std::int64_t> sizes{
        {"m", tokens_},
        {"d", problem_.size("d")},
        {"heads", problem_.size("heads")},
        {"dim", problem_.size("dim")},
        {"cache-slots", problem_.size("batch") * problem_.size("cache")}};
    for (const char* name : {"kv-heads", "rotary", "positions"})
      if (problem_.sizes.contains(name)) sizes[name] = problem_.size(name);
    const std::string rotation = option_or(problem_, "rotation", "halves");
    std::map<std::string, std::string> options{{"bias", option_or(problem_, "qkv-bias", "no")},
                                               {"norm", option_or(problem_, "qk-norm", "no")},
                                               {"eps", option_or(problem_, "eps", usual_eps)},
                                               {"rotation", rotation},
                                               {"cache", "yes"}};
    if (rotation != "none") {
      options["angles"] = option_or(problem_, "angles", "base");
      for (const char* name :
           {"base", "factor", "context", "low", "high", "beta-fast", "beta-slow"})
        if (problem_.options.contains(name)) options[name] = problem_.option(name);
      if (problem_.options.contains("rope-scale")) options["scale"] = problem_.option("rope-scale");
    }
    add("qkv", qkv_op(), std::move(sizes), std::move(options), {{"x", "normalised"}});
  }

  void add_attention() {
    const std::int64_t s = size_or(problem_, "s", 1);
    std::map<std::string, std::int64_t> sizes{{"b", problem_.size("batch")},
                                              {"s", s},
                                              {"kv", problem_.size("cache")},
                                              {"heads", problem_.size("heads")},
                                              {"dim", problem_.size("dim")}};
    for (const char* name : {"kv-heads", "window"})
      if (problem_.sizes.contains(name)) sizes[name] = problem_.size(name);
    // A single query stands at the last key: all that there are come before it.
    std::map<std::string, std::string> options{{"lengths", "yes"},
                                               {"mask", s > 1 ? "causal" : "none"}};
    for (const char* name : {"softcap", "scale"})
      if (problem_.options.contains(name)) options[name] = problem_.option(name);
    add("attention", attention_op(), std::move(sizes), std::move(options),
        {{"k", "k_cache"}, {"v", "v_cache"}, {"out", "attended"}});
  }

  void add_out() {
    Names names{{"x", "attended"}, {"w", "w_o"}, {"bias", "b_o"}, {"residual", "x"}, {"y", "mid"}};
    add("out", linear_op(),
        {{"m", tokens_},
         {"k", problem_.size("heads") * problem_.size("dim")},
         {"n", problem_.size("d")}},
        {{"bias", option_or(problem_, "out-bias", "no")}, {"residual", "yes"}}, std::move(names));
  }

  void add_ffn() {
    const std::map<std::string, std::int64_t> sizes{
        {"m", tokens_}, {"d", problem_.size("d")}, {"h", problem_.size("h")}};
    std::map<std::string, std::string> options{
        {"act", option_or(problem_, "act", "silu")},
        {"bias", problem_.has("ffn-bias", "yes") ? "down" : "none"},
        {"residual", "yes"},
        {"norm", "rms"},
        {"convention", option_or(problem_, "convention", "llama")},
        {"eps", option_or(problem_, "eps", usual_eps)}};
    add("ffn", ffn_op(), sizes, std::move(options),
        {{"x", "mid"},
         {"residual", "mid"},
         {"w_norm", "ffn_norm"},
         {"normalised", "ffn_normalised"}});
  }

  const Problem& problem_;
  std::int64_t tokens_;
  bool post_norms_;
  std::vector<OpPart> parts_;
};

}  // namespace

std::vector<OpPart> parts_of(const Problem& problem) {
  return Parts(problem).all();
}

std::vector<PartKind> part_kinds() {
  return {{"attn_norm", rmsnorm_op},
          {"qkv", qkv_op},
          {"attention", attention_op},
          {"out", linear_op},
          {"ffn", ffn_op}};
}

}  // namespace fftune::layer
