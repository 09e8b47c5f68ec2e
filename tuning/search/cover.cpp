#include "tuning/search/cover.hpp"

namespace fftune {

Cover least_cover(const std::vector<Piece>& pieces, const Span& span) {
  struct Best {
    double cost = std::numeric_limits<double>::infinity();  // from this stage to the end
    std::size_t piece = 0;
  };
  std::vector<Best> from(span.stage_count + 1);
  from.back().cost = 0;
  for (std::size_t stage = span.stage_count; stage-- > 0;)
    for (std::size_t place = 0; place < pieces.size(); ++place) {
      const Span& own = pieces[place].span;
      const std::size_t next = stage + own.stage_count;
      if (own.first_stage != span.first_stage + stage || next > span.stage_count) continue;
      const double cost = pieces[place].cost + from[next].cost;
      if (cost < from[stage].cost) from[stage] = {cost, place};
    }
  Cover cover;
  cover.cost = from.front().cost;
  if (cover.cost < std::numeric_limits<double>::infinity())
    for (std::size_t stage = 0; stage < span.stage_count;) {
      cover.pieces.push_back(from[stage].piece);
      stage += pieces[from[stage].piece].span.stage_count;
    }
  return cover;
}

}  // namespace fftune
