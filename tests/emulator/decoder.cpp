#include "emulator/decoder.hpp"

#include <algorithm>
#include <stdexcept>

namespace fftune::emulator {
namespace {

constexpr std::size_t slot_alignment = 64;

const Dimensions& dimensions(const Warp& warp) {
  return warp.cta->cluster->launch->dimensions;
}

/// An identifier of three components, by the number that the name ends with.
template <class F>
std::optional<Preset> component(std::string_view name, std::string_view stem, F) {
  if (name.size() != stem.size() + 2 || !name.starts_with(stem)) return {};
  return Preset{0, 0, static_cast<std::uint64_t>(name.back() - 'x'),
                [](const Warp& warp, int lane, std::uint64_t axis) -> std::uint64_t {
                  return F()(warp, lane, axis);
                }};
}

template <class F>
Preset scalar(F) {
  return {0, 0, 0, [](const Warp& warp, int lane, std::uint64_t) -> std::uint64_t {
            return F()(warp, lane);
          }};
}

std::uint32_t thread_of(const Warp& warp, int lane) {
  return warp.index * warp_lanes + static_cast<std::uint32_t>(lane);
}

std::optional<Preset> identifier(std::string_view name) {
  if (auto found = component(name, "%tid", [](const Warp& warp, int lane, std::uint64_t axis) {
        const auto& block = dimensions(warp).block;
        const std::uint32_t thread = thread_of(warp, lane);
        return axis == 0   ? thread % block[0]
               : axis == 1 ? thread / block[0] % block[1]
                           : thread / block[0] / block[1];
      }))
    return found;
  if (auto found = component(name, "%ntid", [](const Warp& warp, int, std::uint64_t axis) {
        return dimensions(warp).block[axis];
      }))
    return found;
  if (auto found = component(name, "%ctaid", [](const Warp& warp, int, std::uint64_t axis) {
        return warp.cta->index[axis];
      }))
    return found;
  if (auto found = component(name, "%nctaid", [](const Warp& warp, int, std::uint64_t axis) {
        return dimensions(warp).grid[axis];
      }))
    return found;
  if (auto found = component(name, "%cluster_ctaid", [](const Warp& warp, int, std::uint64_t axis) {
        return warp.cta->index[axis] % dimensions(warp).cluster[axis];
      }))
    return found;
  if (auto found = component(
          name, "%cluster_nctaid",
          [](const Warp& warp, int, std::uint64_t axis) { return dimensions(warp).cluster[axis]; }))
    return found;
  if (auto found = component(name, "%clusterid", [](const Warp& warp, int, std::uint64_t axis) {
        return warp.cta->index[axis] / dimensions(warp).cluster[axis];
      }))
    return found;
  if (auto found = component(name, "%nclusterid", [](const Warp& warp, int, std::uint64_t axis) {
        return dimensions(warp).grid[axis] / dimensions(warp).cluster[axis];
      }))
    return found;
  if (name == "%laneid")
    return scalar([](const Warp&, int lane) { return static_cast<std::uint32_t>(lane); });
  if (name == "%warpid") return scalar([](const Warp& warp, int) { return warp.index; });
  if (name == "%cluster_ctarank")
    return scalar([](const Warp& warp, int) { return warp.cta->rank; });
  if (name == "%cluster_nctarank")
    return scalar([](const Warp& warp, int) { return warp.cta->cluster->ctas.size(); });
  if (name == "%smid")
    return scalar([](const Warp& warp, int) {
      const Launch& launch = *warp.cta->cluster->launch;
      return warp.cta->index[0] % static_cast<std::uint32_t>(launch.device.multiprocessors);
    });
  if (name == "%nsmid")
    return scalar([](const Warp& warp, int) {
      return static_cast<std::uint64_t>(warp.cta->cluster->launch->device.multiprocessors);
    });
  if (name == "%dynamic_smem_size")
    return scalar([](const Warp& warp, int) { return dimensions(warp).shared_bytes; });
  if (name == "%lanemask_lt")
    return scalar([](const Warp&, int lane) { return (Mask{1} << lane) - 1; });
  if (name == "%lanemask_le")
    return scalar([](const Warp&, int lane) { return (Mask{2} << lane) - 1; });
  if (name == "%lanemask_eq") return scalar([](const Warp&, int lane) { return Mask{1} << lane; });
  if (name == "%lanemask_gt")
    return scalar([](const Warp&, int lane) { return ~((Mask{2} << lane) - 1); });
  if (name == "%lanemask_ge")
    return scalar([](const Warp&, int lane) { return ~((Mask{1} << lane) - 1); });
  if (name == "WARP_SZ") return Preset{0, 0, warp_lanes, nullptr};
  return {};
}

std::size_t aligned(std::size_t bytes, std::size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

Decoder::Decoder(const KernelText& text, const Module& module) : text_(text), module_(module) {
  kernel_.text = &text;
  for (const auto& [name, variable] : text.variables) {
    const bool is_local = variable.space == "local";
    std::size_t& bytes = is_local ? kernel_.local_bytes : kernel_.shared_bytes;
    bytes = aligned(bytes, variable.alignment);
    (is_local ? local_offsets_ : shared_offsets_)[name] = bytes;
    bytes += variable.bytes;
  }
  kernel_.local_bytes = aligned(kernel_.local_bytes, 16);
}

Kernel Decoder::run() {
  constexpr Execute (*subjects[])(Decoder&) = {decode_arithmetic, decode_conversion, decode_memory,
                                               decode_control,    decode_async,      decode_tensor};
  for (const Statement& statement : text_.statements) {
    statement_ = &statement;
    Instruction instruction;
    instruction.statement = &statement;
    if (!statement.guard.empty()) {
      Operand guard;
      guard.text = statement.guard;
      instruction.guard = static_cast<std::int32_t>(predicate(guard).slot);
      instruction.guard_negated = statement.guard_negated;
    }
    for (const auto subject : subjects)
      if (!instruction.execute) instruction.execute = subject(*this);
    if (!instruction.execute) unknown();
    kernel_.code.push_back(std::move(instruction));
  }
  kernel_.dynamic_begin = aligned(kernel_.shared_bytes, dynamic_alignment_);
  return std::move(kernel_);
}

std::uint32_t Decoder::allocate(std::size_t bytes) {
  const std::size_t slot = kernel_.register_bytes;
  kernel_.register_bytes += aligned(bytes * warp_lanes, slot_alignment);
  return static_cast<std::uint32_t>(slot);
}

std::optional<std::uint32_t> Decoder::find(const Operand& operand, std::size_t* bytes) {
  if (operand.kind != Operand::Kind::atom) unknown();
  std::size_t owner = 0;
  const std::size_t* const found = text_.find_register(statement_->scope, operand.text, &owner);
  if (found == nullptr) return {};
  *bytes = *found;
  const auto key = std::to_string(owner) + operand.text;
  const auto [entry, is_new] = slots_.try_emplace(key, 0);
  if (is_new) entry->second = allocate(*found == 0 ? 4 : *found);
  return entry->second;
}

std::uint32_t Decoder::preset(const std::string& key, Preset value) {
  const auto [entry, is_new] = slots_.try_emplace(key, 0);
  if (is_new) {
    entry->second = value.slot = allocate(value.bytes);
    kernel_.presets.push_back(value);
  }
  return entry->second;
}

std::optional<Preset> Decoder::symbol(const std::string& name) {
  if (const auto found = shared_offsets_.find(name); found != shared_offsets_.end())
    return Preset{0, 0, shared_begin + found->second, nullptr};
  if (const auto found = local_offsets_.find(name); found != local_offsets_.end())
    return Preset{0, 0, found->second,
                  [](const Warp& warp, int lane, std::uint64_t offset) -> std::uint64_t {
                    return reinterpret_cast<std::uint64_t>(warp.cta->local.data()) +
                           warp.kernel->local_bytes * thread_of(warp, lane) + offset;
                  }};
  if (const auto found = text_.parameter_index.find(name); found != text_.parameter_index.end())
    return Preset{
        0, 0, text_.parameters[found->second].offset,
        [](const Warp& warp, int, std::uint64_t offset) -> std::uint64_t {
          return reinterpret_cast<std::uint64_t>(warp.cta->cluster->launch->parameters.data()) +
                 offset;
        }};
  if (const auto found = module_.variables.find(name); found != module_.variables.end())
    return Preset{0, 0, reinterpret_cast<std::uint64_t>(found->second), nullptr};
  const auto found = module_.text.variables.find(name);
  if (found == module_.text.variables.end()) return {};
  const Variable& shared = found->second;
  if (shared.bytes > 0) {
    kernel_.shared_bytes = aligned(kernel_.shared_bytes, shared.alignment);
    shared_offsets_[name] = kernel_.shared_bytes;
    kernel_.shared_bytes += shared.bytes;
    return symbol(name);
  }
  dynamic_alignment_ = std::max(dynamic_alignment_, shared.alignment);
  return Preset{0, 0, 0, [](const Warp& warp, int, std::uint64_t) -> std::uint64_t {
                  return shared_begin + warp.kernel->dynamic_begin;
                }};
}

std::uint32_t Decoder::source(const Operand& operand, std::size_t bytes) {
  std::size_t own = 0;
  if (const auto slot = find(operand, &own)) {
    if (own != bytes) unknown();
    return *slot;
  }
  auto value = identifier(operand.text);
  if (!value) value = symbol(operand.text);
  if (!value)
    if (const auto number = literal(operand.text)) value = Preset{0, 0, *number, nullptr};
  if (!value) unknown();
  value->bytes = bytes;
  return preset(operand.text + ":" + std::to_string(bytes), *value);
}

std::uint32_t Decoder::target(const Operand& operand, std::size_t bytes) {
  if (operand.text == "_") return preset("_", {0, 16, 0, nullptr});
  std::size_t own = 0;
  const auto slot = find(operand, &own);
  if (!slot || own != bytes) unknown();
  return *slot;
}

std::size_t Decoder::width(const Operand& operand) const {
  std::size_t owner = 0;
  const std::size_t* const found = text_.find_register(statement_->scope, operand.text, &owner);
  return found != nullptr ? *found : 0;
}

std::vector<std::uint32_t> Decoder::sources(const Operand& vector, std::size_t bytes) {
  std::vector<std::uint32_t> slots;
  for (const Operand& element : vector.elements) slots.push_back(source(element, bytes));
  return slots;
}

Predicate Decoder::predicate(const Operand& operand) {
  std::size_t bytes = 0;
  if (const auto slot = find(operand, &bytes)) {
    if (bytes != 0) unknown();
    return {*slot, operand.negated};
  }
  const auto number = literal(operand.text);
  if (!number) unknown();
  const bool value = (*number != 0) != operand.negated;
  return {preset(value ? "true" : "false", {0, 4, value ? all_lanes : 0, nullptr}), false};
}

std::uint32_t Decoder::target_predicate(const Operand& operand) {
  if (operand.text == "_") return preset("_", {0, 16, 0, nullptr});
  return predicate(operand).slot;
}

Address Decoder::address(const Operand& operand) {
  return address(operand, space());
}

Address Decoder::address(const Operand& operand, Space space) {
  if (operand.kind != Operand::Kind::address) unknown();
  const Operand& base = operand.elements.at(0);
  std::size_t bytes = 0;
  const auto slot = find(base, &bytes);
  if (slot && bytes != 4 && bytes != 8) unknown();
  return {slot ? *slot : source(base, 8), !slot || bytes == 8, operand.offset, space};
}

Space Decoder::space() const {
  for (const std::string& part : statement_->opcode) {
    if (part == "global") return Space::global;
    if (part == "shared" || part == "shared::cta") return Space::shared;
    if (part == "shared::cluster") return Space::cluster;
    if (part == "local" || part == "param") return Space::local;
    if (part == "const") return Space::global;
  }
  return Space::generic;
}

std::int64_t Decoder::number(const Operand& operand) const {
  const auto value = literal(operand.text);
  if (!value) unknown();
  return static_cast<std::int64_t>(*value);
}

std::uint32_t Decoder::label(const std::string& name) const {
  return static_cast<std::uint32_t>(text_.find_label(statement_->scope, name));
}

void Decoder::unknown() const {
  throw std::runtime_error("the emulator does not know: " + std::string(statement_->text));
}

Kernel decode(const KernelText& text, const Module& module) {
  return Decoder(text, module).run();
}

}  // namespace fftune::emulator
