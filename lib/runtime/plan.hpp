// A plan: a problem bound to one variant per stage, compiled, ready to run.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "device/backend.hpp"
#include "registry/catalog.hpp"
#include "registry/holders.hpp"
#include "registry/op.hpp"
#include "registry/variant.hpp"

namespace fftune {

// Where a plan's tensors are: the caller's buffers, and the intermediates in the workspace.

using Executables = std::vector<std::shared_ptr<const Executable>>;

/// A plan's tensors, at most: a run keeps their addresses on its stack.
constexpr std::size_t most_tensors = 4096;

class TensorLayout {
 public:
  /// Throws Error(unavailable) for tensors of more than 2^62 bytes together.
  TensorLayout(const Op& op, const Problem& problem);

  /// Takes away the memory of intermediates that no step of the plan's programs has: a family that
  /// covers their writer and their readers may not need them. `used`: for each tensor.
  void leave_out_unused(const std::vector<bool>& used);

  /// The op's tensors in order; the first buffer_count() of them are the caller's buffers.
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  std::size_t buffer_count() const { return buffer_count_; }
  /// Intermediates, then `scratch_bytes` that the executables share.
  std::size_t workspace_bytes(std::size_t scratch_bytes) const;

  /// Enqueues the executables one after the other. Allocates nothing.
  void enqueue(const Executables& executables, void* const* buffers, void* workspace,
               void* stream) const;

 private:
  std::vector<TensorSpec> tensors_;
  std::size_t buffer_count_ = 0;
  std::vector<std::size_t> intermediate_offsets_;  // in the workspace
  std::size_t scratch_offset_ = 0;
};

/// The memory of a problem's tensors: each has its own, but an intermediate of a repetition has
/// that of the last but one, as those of two neighbours are in use at once.
Holders holders_of(const Op& op, const Problem& problem, const std::vector<TensorSpec>& tensors);

/// The same without intermediates that no program of the recipe has.
Holders holders_of(const Op& op, const Problem& problem, const std::vector<TensorSpec>& tensors,
                   const DeviceFacts& facts, const Recipe& recipe);

/// The bytes of the tensors that have memory of their own, in double, as they may multiply beyond
/// 64 bits.
double held_bytes(const std::vector<TensorSpec>& tensors, const Holders& holders);

/// Throws Error(unavailable) for a workspace larger than the device's memory. The other tensors of
/// a plan are its caller's: they are there already, and some may share memory.
void check_workspace(const Problem& problem, std::size_t bytes, const DeviceFacts& facts);

/// Marks the tensors that a step of the program has; of a function on the host, which may take any,
/// all.
void mark_used(const Program& program, std::vector<bool>& used);

// The work that a plan enqueues: the executables of a recipe's variants, in order.

/// Throws Error(invalid_input) unless variants that are legal here cover every stage once, in
/// order.
void check_recipe(const Op& op, const Problem& problem, const DeviceFacts& facts,
                  const Recipe& recipe);

/// The program of a recipe's variant behind the one before it: not launched programmatically where
/// that one writes what its first kernel reads early.
Program program_in(const Recipe& recipe, std::size_t place, const Op& op, const Problem& problem,
                   const DeviceFacts& facts);

/// Makes the program one that a plan can begin with: its first kernel, which may load weights
/// before it waits, would overtake what wrote them.
void launch_normally(Program& program);

/// The result's executable. Throws Error(unavailable) if the variant does not compile.
std::shared_ptr<const Executable> executable_of(CompileResult result, const Variant& variant,
                                                const DeviceFacts& facts);

/// A variant, and its program for a problem.
struct VariantProgram {
  Variant variant;
  Program program;
};

/// Binds them (Backend::bind) on as many threads as they have kernels: a compiler takes seconds for
/// each. Throws Error(unavailable) for the first that does not compile.
Executables compile_side_by_side(Backend& backend, const std::vector<VariantProgram>& programs);

/// Makes a variant's program executable, or throws.
using MakeExecutable =
    std::function<std::shared_ptr<const Executable>(const Variant&, const Program&)>;

/// A plan's executables in their order; for a problem that is made of equal ones, once for each.
Executables executables_of(const Op& op, const Problem& problem, const DeviceFacts& facts,
                           const Recipe& recipe, const MakeExecutable& make);

/// The most scratch that any of them needs.
std::size_t scratch_bytes(const Executables& executables);

class Plan {
 public:
  /// Compiles all variants of `recipe` at once on `backend`, which must outlive the plan. Throws
  /// Error(invalid_input) if a variant is illegal, Error(unavailable) if one does not compile.
  Plan(Backend& backend, const Op& op, Problem problem, Recipe recipe);

  /// Reads and writes `buffers` (the op's inputs, then outputs, device addresses) on `stream`.
  /// `workspace` has workspace_bytes(), 256-byte aligned. Allocates nothing, never synchronises.
  void run(void* const* buffers, void* workspace, void* stream) const;

  const Op& op() const { return *op_; }
  const Problem& problem() const { return problem_; }
  const Recipe& recipe() const { return recipe_; }
  /// The op's tensors in order; the first buffer_count() of them are the caller's buffers.
  const std::vector<TensorSpec>& tensors() const { return layout_.tensors(); }
  std::size_t buffer_count() const { return layout_.buffer_count(); }
  /// Intermediates, then the largest workspace of any variant.
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  const Executables& executables() const { return executables_; }
  /// For each tensor, whether the executables have it; of a repetition empty.
  const std::vector<bool>& used() const { return used_; }

 private:
  const Op* op_;
  Problem problem_;
  Recipe recipe_;
  TensorLayout layout_;
  std::size_t workspace_bytes_ = 0;
  Executables executables_;
  std::vector<bool> used_;
};

}  // namespace fftune
