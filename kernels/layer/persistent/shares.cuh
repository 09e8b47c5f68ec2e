// A CTA's share of each product: rows of weights, and the results that a thread has of them.
#pragma once

#include "gemm/decode/packed_stage_shape.cuh"
#include "layer/persistent/form.cuh"

namespace fftune {

struct persistent_shares : persistent_form {
  static constexpr int block_rows = 16;  // of a stage, and of an MMA

  // Rows of a product, or features between up and down, that are one CTA's: a multiple of these.
  constexpr int attention_unit() const { return packs_attention ? packed_rows : 1; }
  constexpr int down_unit() const { return packs_network ? packed_rows : 1; }
  constexpr int hidden_unit() const { return packs_network ? packed_rows : has_experts() ? 8 : 1; }
  constexpr int head_unit() const { return packs_head ? packed_rows : 1; }
  constexpr int most_rows(int rows, int unit) const { return up(up(rows, unit), blocks) * unit; }
  // Whether a thread has the same element of the residual stream behind both parts of a layer.
  constexpr bool keeps_residual() const {
    return attention_unit() == down_unit() && !shares_tiles();
  }
  constexpr int most_residual_rows() const { return most_rows(d, packs() ? packed_rows : 1); }
  // Whether L2 can take weights ahead: gate and up, or beside experts dense ones of the next layer.
  constexpr bool can_look_ahead() const { return !packs_attention || !has_experts(); }
  // Experts of all tokens; each is a slot. Tokens that choose the same expert have a slot of it
  // each.
  constexpr int slots() const { return tokens * of_token(); }
  // Down of packed experts is a part of each slot for each tile of 16 rows. Where whole tiles would
  // leave many CTAs with few, the parts are shared out in their order. A CTA then begins with the
  // last parts of a tile that it does not own, and hands their sums to the CTA before it.
  constexpr int down_parts() const { return d / packed_rows * slots(); }
  constexpr bool shares_tiles() const {
    return tokens == 1 && packs_network && has_experts() && down_parts() / blocks >= slots() - 1 &&
           7 * up(d / packed_rows, blocks) * slots() > 8 * up(down_parts(), blocks);
  }
  // Where CTA `block`'s parts begin, and the rows of the tiles that it owns: those whose first part
  // is the CTA's.
  constexpr int first_part(int block) const {
    return shares_tiles() ? down_parts() * block / blocks
                          : d / packed_rows * block / blocks * slots();
  }
  constexpr int first_owned_row(int block) const {
    return up(first_part(block), slots()) * packed_rows;
  }
  // Features between gate and down, of a token, and those that are shared out among CTAs: with
  // experts of all slots.
  constexpr int hidden() const { return of_token() * h; }
  constexpr int all_hidden() const { return has_experts() ? slots() * h : h; }
  // Blocks of 16 rows of weights that a CTA multiplies at most.
  constexpr int most_blocks() const {
    const int of[] = {up(most_rows(qkv_rows(), attention_unit()), 16),
                      up(most_residual_rows(), 16) + (shares_tiles() ? 1 : 0),
                      up(most_rows(all_hidden(), hidden_unit()), 8)};
    return of[0] > of[2] ? (of[0] > of[1] ? of[0] : of[1]) : (of[1] > of[2] ? of[1] : of[2]);
  }
  // Likewise their tiles of gate and of up, which go in turn: a CTA may begin with the up of a pair
  // that the one before owns.
  constexpr int gate_up_tiles() const { return 2 * (all_hidden() / packed_rows); }
  constexpr bool shares_pairs() const {
    return tokens == 1 && packs_network && has_experts() && gate_up_tiles() >= 2 * blocks &&
           40 * up(gate_up_tiles() / 2, blocks) > 21 * up(gate_up_tiles(), blocks);
  }
  constexpr int first_gate_up(int block) const {
    return shares_pairs() ? gate_up_tiles() * block / blocks
                          : gate_up_tiles() / 2 * block / blocks * 2;
  }
  constexpr int first_owned_hidden(int block) const {
    return up(first_gate_up(block), 2) * packed_rows;
  }
  // Results that a thread has of a product, at most.
  constexpr int own_qkv() const {
    return up(most_rows(qkv_rows(), attention_unit()) * tokens, consumers());
  }
  constexpr int own_hidden() const {
    return up(most_rows(all_hidden(), hidden_unit()), consumers());
  }
  // Biases of them: of down one for each choice.
  constexpr bool has_biases() const { return bias || out_bias || router_bias || expert_bias; }
  constexpr int own_biases() const {
    const int of_choices = choices + shared, hidden = 2 * own_hidden();
    const int of_experts = !expert_bias ? 1 : of_choices > hidden ? of_choices : hidden;
    return bias && own_qkv() > of_experts ? own_qkv() : of_experts;
  }
};

}  // namespace fftune
