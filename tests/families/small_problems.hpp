// Small problems of every family, and the stages that it covers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "support/fields.hpp"

namespace fftune::test {

/// The usual form of the pass, and each rare one by itself.
std::vector<Options> forms_of(const Op& op, const std::string& pass);

/// The examples of the op's sizes, without rare ones; not canonical yet.
Problem example_problem(const Op& op, const std::string& pass, DType dtype,
                        const Options& options = {});

constexpr std::int64_t few_elements = 1 << 20;

std::int64_t elements_of(const Op& op, const Problem& problem);

/// Whether its op is made of ops, and its tensors together have few elements.
bool is_small_whole(const Op& op, const Problem& problem);

/// Whether the op is made of ops that are made of ops: forms of those are tried by themselves.
bool is_nested(const Op& op);

/// The problem with fewer heads, matrices and the like, where its tensors have many elements
/// because one extent has to be long. The family refuses neither.
Problem shrunk(const Op& op, const Family& family, Problem problem, const DeviceFacts& facts);

/// The first small problem of this pass, dtype and form that the family does not refuse. None that
/// needs a group, over the ranks' memory or NCCL: tests/all_reduce and python/tests start ranks.
std::optional<Problem> small_problem(const Op& op, const Family& family, const std::string& pass,
                                     DType dtype, const Options& options, const DeviceFacts& facts);

std::size_t first_stage(const Op& op, const Family& family, const Problem& problem);

}  // namespace fftune::test
