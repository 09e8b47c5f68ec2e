#include "measure/buffer_sets.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "core/distribution.hpp"
#include "device/parallel.hpp"
#include "registry/noise_draw.hpp"
#include "verify/drawn.hpp"
#include "verify/host_threads.hpp"

namespace fftune {
namespace {

constexpr std::size_t alignment = 256;
constexpr double cache_overflow = 2.5;
/// A round of the sets is captured as one CUDA graph, which more passes make slow to instantiate. A
/// round on the CPU is a list of calls, and its last-level cache may have hundreds of megabytes.
constexpr int most_sets_cuda = 128;
constexpr int most_sets_cpu = 4096;
/// Beyond two sets, the bytes of all sets: filling more costs seconds. Where the cache is larger,
/// a few times the cache, as a stage reads only a part of each set.
constexpr std::size_t most_bytes = std::size_t{1} << 30;
constexpr std::size_t most_caches = 4;
/// A GPU fills a gigabyte in a millisecond. So there may be more where a stage of some weight reads
/// a small part of each set: the weights of the experts that one token chooses, say.
constexpr std::size_t most_bytes_of_parts = std::size_t{16} << 30;
constexpr double of_weight = 1.0 / 16;  // of what all stages touch

/// Values are drawn for this many elements; longer tensors repeat them. The power of a multiplier
/// depends on the bits that toggle from one product to the next, not on so long a period.
constexpr std::size_t drawn_elements = std::size_t{1} << 21;

/// Nearly normal, standard deviation 1: the sum of four uniform numbers (Irwin-Hall), which costs
/// a fraction of an exact one.
class NormalSource {
 public:
  explicit NormalSource(std::uint64_t seed) : state_(seed) {}

  float next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;  // Knuth, MMIX
    const std::uint64_t mixed = state_ ^ (state_ >> 29);
    float sum = 0;
    for (int part = 0; part < 4; ++part)
      sum += static_cast<float>((mixed >> (16 * part)) & 0xffff) / 65536.0f - 0.5f;
    return sum * 1.7320508f;  // each uniform number has a variance of 1/12
  }

 private:
  std::uint64_t state_;
};

/// The first `given` bytes at `address` are there; those from `from` on are repeated up to `bytes`.
void repeat(Backend& backend, void* address, std::size_t from, std::size_t given,
            std::size_t bytes) {
  auto* base = static_cast<std::byte*>(address);
  for (std::size_t filled = given; filled < bytes;) {
    const std::size_t more = std::min(filled - from, bytes - filled);
    backend.copy(base + filled, base + from, more);
    filled += more;
  }
}

/// The elements that are drawn of a tensor of noise; the others repeat those behind `from`.
std::int64_t drawn_of(const NoiseDraw& noise, std::int64_t elements) {
  const auto units = static_cast<std::int64_t>(drawn_elements) / noise.unit + 1;
  return std::min(elements, noise.from + units * noise.unit);
}

void fill_random(Backend& backend, const TensorSpec& tensor, void* address, NormalSource& source,
                 std::uint64_t seed, Parallel& parallel) {
  if (const auto pattern = parse_pattern(tensor.pattern)) {
    const auto marks = draw_pattern(*pattern, tensor.elements(), seed);
    return backend.write(address, marks.data(), marks.size());
  }
  const auto elements = static_cast<std::size_t>(tensor.elements());
  if (tensor.draw) {
    const auto* const noise = tensor.draw.target<NoiseDraw>();
    const std::int64_t drawn = noise ? drawn_of(*noise, tensor.elements()) : tensor.elements();
    const std::size_t each = dtype_bytes(tensor.dtype);
    auto encoded = large_vector<std::byte>(static_cast<std::size_t>(drawn) * each, parallel);
    draw_encoded(tensor, seed, drawn, encoded.data(), parallel);
    backend.write(address, encoded.data(), encoded.size());
    const std::int64_t from = noise ? noise->from : 0;
    return repeat(backend, address, static_cast<std::size_t>(from) * each, encoded.size(),
                  tensor.bytes());
  }
  std::vector<float> values(std::min(elements, drawn_elements));
  const auto scale = static_cast<float>(tensor.scale);
  const auto mean = static_cast<float>(tensor.mean);
  for (auto& value : values) value = mean + source.next() * scale;
  std::vector<std::byte> encoded(values.size() * dtype_bytes(tensor.dtype));
  encode(tensor.dtype, std::span<const float>(values), encoded.data());
  backend.write(address, encoded.data(), encoded.size());
  repeat(backend, address, 0, encoded.size(), tensor.bytes());
}

/// Whether it was given.
bool fill_given(Backend& backend, const TensorSpec& tensor, void* address,
                const GivenTensors* given, Parallel& parallel) {
  if (given == nullptr || tensor.role == Role::intermediate) return false;
  auto values = large_vector<std::byte>(tensor.bytes(), parallel);
  if (!given->fill(tensor, values, parallel)) return false;
  backend.write(address, values.data(), values.size());
  return true;
}

}  // namespace

SetLayout layout_of(const std::vector<TensorSpec>& tensors, const Holders& holders) {
  SetLayout layout;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::size_t holder = holders.empty() ? i : holders[i];
    if (holder != i) {
      layout.offsets.push_back(holder == nowhere ? nowhere : layout.offsets[holder]);
      continue;
    }
    layout.offsets.push_back(layout.bytes);
    const std::size_t more = (tensors[i].bytes() + alignment - 1) / alignment * alignment;
    layout.bytes += std::min(more, std::numeric_limits<std::size_t>::max() - layout.bytes);
  }
  return layout;
}

int set_count(const std::vector<StageSpec>& stages, std::size_t bytes_per_set,
              const DeviceFacts& facts, std::size_t free_bytes) {
  if (bytes_per_set == 0 || bytes_per_set > free_bytes) return 0;
  const auto cache_bytes = static_cast<std::size_t>(std::max<std::int64_t>(facts.l2_bytes, 0));
  double all = 0;
  for (const auto& stage : stages) all += stage.bytes;
  // As many as overflow the cache by what each stage touches that touches this much.
  const auto overflowing = [&](double bytes) {
    double least = static_cast<double>(bytes_per_set);
    for (const auto& stage : stages)
      if (stage.bytes > bytes) least = std::min(least, stage.bytes);
    return std::ceil(cache_overflow * static_cast<double>(cache_bytes) / least);
  };
  const bool cuda = facts.kind == DeviceKind::cuda;
  const auto within = [&](std::size_t bytes) { return static_cast<double>(bytes / bytes_per_set); };
  double affordable = std::max(within(std::max(most_bytes, most_caches * cache_bytes)), 2.0);
  if (cuda)
    affordable =
        std::max(affordable, std::min(overflowing(of_weight * all), within(most_bytes_of_parts)));
  const double room = std::max(within(free_bytes / 2), 1.0);
  const double most_sets = cuda ? most_sets_cuda : most_sets_cpu;
  const double wanted = std::clamp(overflowing(0), 2.0, most_sets);
  return static_cast<int>(std::min({wanted, room, affordable}));
}

BufferSets::BufferSets(Backend& backend, const std::vector<TensorSpec>& tensors, int count,
                       InputData data, const Holders& holders)
    : backend_(backend), layout_(layout_of(tensors, holders)) {
  // Thousands of small sets are one allocation: a device takes long over each.
  buffer_ = backend.allocate(static_cast<std::size_t>(count) * layout_.bytes);
  for (int set = 0; set < count; ++set) {
    auto* base =
        static_cast<std::byte*>(buffer_->data()) + static_cast<std::size_t>(set) * layout_.bytes;
    std::vector<void*> addresses;
    for (const auto offset : layout_.offsets)
      addresses.push_back(offset == nowhere ? nullptr : base + offset);
    addresses_.push_back(std::move(addresses));
  }
  NormalSource source(data.seed);
  HostThreads threads;
  for (std::size_t i = 0; i < tensors.size() && count > 0; ++i) {
    void* const address = addresses_.front()[i];
    if (address != nullptr && tensors[i].role != Role::output &&
        !fill_given(backend, tensors[i], address, data.given, threads))
      fill_random(backend, tensors[i], address, source, data.seed, threads);
  }
}

void BufferSets::replicate() {
  auto* first = static_cast<std::byte*>(buffer_->data());
  for (std::size_t set = 1; set < addresses_.size(); ++set)
    backend_.copy(first + set * layout_.bytes, first, layout_.bytes);
}

}  // namespace fftune
