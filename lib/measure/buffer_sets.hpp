// Copies of a problem's tensors, used in rotation so that no pass finds its data in the last-level
// cache: in a model, a layer's weights were last read a whole forward pass ago.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/backend.hpp"
#include "registry/holders.hpp"
#include "registry/op.hpp"
#include "verify/input_data.hpp"

namespace fftune {

/// Where the tensors lie in one allocation, each 256-byte aligned; `nowhere` for those without
/// memory. `bytes` is the largest number there is where they are more.
struct SetLayout {
  std::vector<std::size_t> offsets;
  std::size_t bytes = 0;
};
SetLayout layout_of(const std::vector<TensorSpec>& tensors, const Holders& holders = {});

/// How many sets overflow the last-level cache (`facts.l2_bytes`) two and a half times, counting
/// only the bytes of the stage that touches least. At least 2, unless `free_bytes` has room for one
/// alone. At most 128 on a GPU and 4096 on a CPU, half of `free_bytes`, and 1 GiB or four times the
/// cache. A GPU has up to 16 GiB if a stage that touches at most a 16th of each set needs that. 0:
/// not even one fits.
int set_count(const std::vector<StageSpec>& stages, std::size_t bytes_per_set,
              const DeviceFacts& facts, std::size_t free_bytes);

class BufferSets {
 public:
  /// Allocates, and fills the first set's inputs with `data` and its intermediates with normal
  /// values of their tensors' scale. Throws Error(unavailable).
  BufferSets(Backend& backend, const std::vector<TensorSpec>& tensors, int count, InputData data,
             const Holders& holders = {});

  /// Copies the first set to the others.
  void replicate();

  int count() const { return static_cast<int>(addresses_.size()); }
  std::size_t bytes_per_set() const { return layout_.bytes; }
  /// Addresses in the order of the tensors; null for one without memory.
  const std::vector<void*>& tensors(int set) const {
    return addresses_[static_cast<std::size_t>(set)];
  }

 private:
  Backend& backend_;
  SetLayout layout_;
  std::unique_ptr<Buffer> buffer_;
  std::vector<std::vector<void*>> addresses_;
};

}  // namespace fftune
