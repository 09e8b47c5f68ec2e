// The kinds of a model's layers: a, which the problem's own fields describe, and others, such as
// linear attention between layers of attention.
//
// The option layers-b has the mixer and the other fields of layers b, "conv:dim=64,heads=32,…", as
// the op layer has them, but for what all layers share: batch, d, cache, page, pages and lengths.
// `pattern` says the kind of each layer: "bba" is two layers b and one a, again and again up
// to the size `layers`. Without that size there is one layer of each kind, a first.
#pragma once

#include <cstddef>
#include <iterator>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "registry/op.hpp"

namespace fftune::decoding {

/// Kind a, and those that an option describes, by the names of parts and of options.
constexpr const char* kind_parts[] = {"layer", "layers-b", "layers-c"};
constexpr std::size_t most_kinds = std::size(kind_parts);

/// The options `pattern` and those of the kinds.
std::vector<OptionField> kind_options();
/// Why the pattern and the kinds do not go together, one line; empty: they do.
std::string contradiction_of_kinds(const Problem& problem);

std::size_t kinds_of(const Problem& problem);
/// One layer of a kind, or with one kind all layers: a canonical problem of the op layer.
Problem layers_of_kind(const Problem& problem, std::size_t kind);
/// The kinds of the layers in order; of a problem with one kind 0 alone.
std::vector<std::size_t> kinds_in_order(const Problem& problem);

/// The names of a layer's tensors among those of all layers in order.
class LayerNames {
 public:
  /// `repeated`: by the layers' numbers. Else there is one layer of each kind.
  LayerNames(std::size_t layers, bool repeated) : layers_(layers), repeated_(repeated) {}

  std::string operator()(std::size_t layer, const std::string& own) const;

 private:
  std::string prefix(std::size_t layer) const;

  std::size_t layers_;
  bool repeated_;
};

}  // namespace fftune::decoding
