// The fields of a problem, as tests write them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "core/problem.hpp"

namespace fftune::test {

using Sizes = std::map<std::string, std::int64_t>;
using Options = std::map<std::string, std::string>;

/// Problems of an op in f32 on the CPU, with these sizes where a test gives no others.
struct SmallProblems {
  Problem (*make)(DeviceKind, const std::string& pass, DType, Sizes, Options);
  Sizes sizes;

  Problem operator()(const std::string& pass, Sizes given, Options options = {}) const {
    given.insert(sizes.begin(), sizes.end());
    return make(DeviceKind::cpu, pass, DType::f32, std::move(given), std::move(options));
  }
};

}  // namespace fftune::test
