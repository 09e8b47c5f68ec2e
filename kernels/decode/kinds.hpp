// The kinds of a model's layers: a, which the problem's own fields describe, and others, such as
// linear attention between layers of attention.
//
// The option layers-b has the mixer and the other fields of layers b, "conv:dim=64,heads=32,…", as
// the op layer has them, but for what all layers share: batch, d, cache, page, pages and lengths.
// `pattern` says the kind of each layer: "bba" is two layers b and one a, again and again up
// to the size `layers`. Without that size there is one layer of each kind, a first.
//
// With angles-for=kinds each kind that rotates has angles of its own, such as Gemma 3's layers with
// windows and those without: `angles` of kind a, `b.angles` of kind b.
#pragma once

#include <cstddef>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.hpp"
#include "registry/op.hpp"

namespace fftune::decoding {

/// Kind a, and those that an option describes, by the names of parts and of options.
constexpr const char* kind_parts[] = {"layer", "layers-b", "layers-c"};
constexpr std::size_t most_kinds = std::size(kind_parts);

/// The options `pattern`, `angles-for` and those of the kinds.
std::vector<OptionField> kind_options();
/// Why the pattern and the kinds do not go together, one line; empty: they do.
std::string contradiction_of_kinds(const Problem& problem);

std::size_t kinds_of(const Problem& problem);
/// Whether each kind has angles of its own.
bool has_own_angles(const Problem& problem);
/// One layer of a kind, or with one kind all layers: a canonical problem of the op layer.
Problem layers_of_kind(const Problem& problem, std::size_t kind);
/// The kinds of the layers in order; of a problem with one kind 0 alone.
std::vector<std::size_t> kinds_in_order(const Problem& problem);

/// The names of a layer's tensors among those of all layers in order.
class LayerNames {
 public:
  /// `kinds`: that of each layer. `repeated`: by the layers' numbers. Else there is one layer of
  /// each kind.
  LayerNames(std::vector<std::size_t> kinds, bool repeated, bool own_angles)
      : kinds_(std::move(kinds)), repeated_(repeated), own_angles_(own_angles) {}

  std::string operator()(std::size_t layer, const std::string& own) const;
  /// Whether layers share the tensor of this name: all of them, or those of a kind.
  static bool are_shared(const std::string& name);

 private:
  std::string prefix(std::size_t layer) const;

  std::vector<std::size_t> kinds_;
  bool repeated_, own_angles_;
};

}  // namespace fftune::decoding
