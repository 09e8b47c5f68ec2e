// A family of indexer: it computes both stages, so that scores which no query sees are not written.
#pragma once

#include <string>
#include <vector>

#include "kernels/common/stage_family.hpp"
#include "kernels/indexer/indexer.hpp"

namespace fftune::indexer {

class IndexerFamily final : public StageFamily {
 public:
  using StageFamily::StageFamily;
  std::vector<std::string> stages() const override { return {stage_scores, stage_choose}; }
};

}  // namespace fftune::indexer
