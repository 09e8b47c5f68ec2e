// The head of a whole token in the persistent form: the best id of each sequence, and its state.
#pragma once

#include "common/choice.cuh"
#include "layer/next_token.cuh"
#include "layer/persistent/product.cuh"

namespace fftune {

template <class T, persistent_config c>
struct persistent_head {
  using layout = persistent_cta<T, c>;
  const layout& cta;

  // Adds the logits of `rows` ids, this CTA's from `first` on, to the best of a thread's token.
  __device__ __forceinline__ void finish_logits(row_choice<layout::choice>& best,
                                                const row_scores<layout::choice>& scores, int first,
                                                int rows) const {
    const int column = threadIdx.x % layout::token_places;
    if (column >= c.tokens) return;
#pragma unroll 1
    for (int row = threadIdx.x / layout::token_places; row < rows;
         row += c.consumers() / layout::token_places) {
      const int id = cta.first_row(c.vocab, c.head_unit()) + first + row;
      float logit = persistent_sums<c>::of(cta.shared, row / 16, row % 16, column);
      if constexpr (c.head_bias)
        logit += to_float(static_cast<const T*>(cta.p.token.head_bias)[id]);
      if constexpr (c.rounds_head) logit = to_float(from_float<T>(logit));
      logit = scores.cap(logit);
      if constexpr (c.sums) best.add_sum_of(logit);
      const random_words words = scores.words(id / 4);
      const u32 even = id % 4 < 2 ? words.word[0] : words.word[2];
      const u32 odd = id % 4 < 2 ? words.word[1] : words.word[3];
      best.take(rank_of(scores.score(logit, id % 2 == 0 ? even : odd)), id, logit);
    }
  }

  // The best of all threads of this CTA, then in CTA 0 those of all CTAs.
  __device__ __forceinline__ void choose(row_choice<layout::choice> best) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = layout::token_places; distance < 32; distance *= 2) best.add_lane(distance);
    cta.sync_consumers();  // the sums are read
    choice_part* const of_warps =
        reinterpret_cast<choice_part*>(__cvta_shared_to_generic(cta.shared + c.sums_at()));
    if (lane < layout::token_places) best.store(of_warps + warp * layout::token_places + lane);
    cta.sync_consumers();
    u8* const parts = static_cast<u8*>(cta.p.workspace) +
                      smaller(c.copies_of_set, cta.p.layers) * c.set_bytes(cta.p.cache);
    constexpr u64 flag = 1;
    if (warp == 0 && lane < c.tokens) {
      row_choice<layout::choice> all;
      for (int i = 0; i < c.warps; ++i) {
        row_choice<layout::choice> part;
        part.load(of_warps[i * layout::token_places + lane]);
        all.add(part);
      }
      u8* const to = parts + (blockIdx.x * c.tokens + lane) * c.part_bytes;
      store_flagged(to, all.rank, all.id, flag);
      store_flagged(to + 16, __float_as_uint(all.logit), __float_as_uint(all.largest), flag);
      store_flagged(to + 32, __float_as_uint(all.sum), 0, flag);
    }
    if (blockIdx.x > 0 || warp >= c.tokens) return;
    row_choice<layout::choice> all;
#pragma unroll 1
    for (int block = lane; block < c.blocks; block += 32) {
      const u8* const from = parts + (block * c.tokens + warp) * c.part_bytes;
      flagged_word word[3];
      int spins = 0;
      do {
#pragma unroll
        for (int i = 0; i < 3; ++i) word[i] = load_flagged(from + i * 16);
        count_spin(spins);
      } while (word[0].flag != flag || word[1].flag != flag || word[2].flag != flag);
      row_choice<layout::choice> part;
      part.rank = static_cast<int>(word[0].data[0]), part.id = static_cast<int>(word[0].data[1]);
      part.logit = __uint_as_float(word[1].data[0]);
      part.largest = __uint_as_float(word[1].data[1]);
      part.sum = __uint_as_float(word[2].data[0]);
      all.add(part);
    }
    __syncwarp();
    all.add_warp();
    if (lane > 0) return;
    all.finish(warp, cta.p.token.chosen, cta.p.token.logit, cta.p.token.logprob);
    advance_sequence({.limits = cta.p.token.limits,
                      .stop = cta.p.token.stop,
                      .ids = cta.p.token.next_ids,
                      .lengths = cta.p.token.next_lengths,
                      .steps = cta.p.token.steps,
                      .ended = cta.p.token.next_ended,
                      .out = cta.p.token.out,
                      .cache = cta.p.cache,
                      .stops = cta.p.token.stops,
                      .room = cta.p.token.room,
                      .pad = cta.p.token.pad},
                     warp, all.id);
  }
};

}  // namespace fftune
