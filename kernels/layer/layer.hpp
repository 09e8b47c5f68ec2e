// One transformer layer, or `layers` of them: new tokens of each sequence against its cache, in
// decoding one, in prefill many.
//
//   n   = norm(x)
//   q   = rotated heads of n·w_qᵀ;  rows of k and v, likewise, go to the caches
//   a   = attention of q over the first `lengths` keys of each sequence's cache
//   mid = x + a·w_oᵀ                                   post-norms: x + norm(a·w_oᵀ)
//   y   = mid + ffn(norm(mid))                         post-norms: mid + norm(ffn(norm(mid)))
//                                                      block=parallel: mid + ffn(n)
//                                                      block=parallel-norms: mid + ffn(norm(x))
//
// With v-norm=yes each head of v is divided by its root mean square, and with layer-scalar=yes y is
// multiplied by one number (Gemma 4). Values that are keys before their norm have w_k as w_v.
//
// With keys=shared q alone is computed: keys and values are those that another layer has written to
// its caches, which are given as k_cache and v_cache, and nothing is written (Gemma 4 E2B). With
// query-scale=rows the queries of row i are multiplied by q_factors[i] (Mistral 4).
//
// With input-h each token has an input of the layer's own, layer_input [tokens, input-h], and
// norm((act(y·w_input_gateᵀ) ⊙ layer_input)·w_input_outᵀ) is added to y (Gemma 4 E2B), in front of
// the scalar.
//
// With output-gate=features or heads, a is multiplied by sigmoid(n·w_gᵀ) in front of w_o: a gate
// for each feature (AFMoE), or for each head (LFM3). With output-gate=q-rows w_q has the rows of
// w_g too, behind those of each head (Qwen3.5).
//
// With post-norms=only there are no norms but those of what is added: q, k, v and ffn take x and
// mid as they are (OLMo-2). With residual-scale=yes what is added is first multiplied by a vector
// (Granite's residual multiplier).
//
// With ffn=moe the feed-forward network is a mixture of experts: their logits are
// norm(mid)·w_routerᵀ (moe_route/moe_route.hpp, moe/moe.hpp). A network with weights of its own for
// every token (shared-h) is added before the experts are. With a gate, a sigmoid of one product
// (Qwen2-MoE), it is a mixture of one expert, whose weight is that.
//
// With expert-norms=yes the network of shared-h takes norm(mid) by ffn_norm, the router mid by
// router_norm, and the experts mid by experts_norm. Their results are normalised by
// shared_post_norm and experts_post_norm and added, in front of ffn_post_norm (Gemma 4 26B-A4B).
// With expert-scale=yes the weight of a token's expert e is multiplied by expert_scale[e].
//
// With the size `ranks` a rank of a group has a slice of each layer: some heads, and some of the
// features between up and down, which heads, kv-heads, h and shared-h count. With `own-experts` it
// has so many whole experts instead of some features of all; first_expert says which. Its outputs
// of attention and of the feed-forward network are summands, which all-reduce adds over the ranks,
// with the residual and the RMSNorm behind it. x, mid and y are the same on all ranks. One rank
// alone has b_o and b_down; its peers' are zeros.
//
// The option `mixer` has something else in the place of attention (mixer.hpp):
//
//   conv       a = C ⊙ conv(B ⊙ z), [B C z] = n·w_inᵀ: a gated short convolution over the tokens
//              (causal_conv1d/causal_conv1d.hpp) with heads · dim channels
//   mla        latent attention in its absorbed form (mla/mla.hpp): q = n·w_qᵀ, or from a latent
//              of its own, norm(n·w_q_aᵀ)·w_q_bᵀ; n·w_kv_aᵀ has the latent of keys and values and
//              the rotated key, whose norm and rotation go to a row of `cache` [batch, cache, rank
//              + rope]. w_kv_b has of each head the rows of its keys and of its values.
//
//   gated-delta-rule
//              a = norm(rule(conv(q), conv(k), conv(v))) ⊙ silu(n·w_zᵀ), where q, k and v are
//              products of n, conv has SiLU behind it, and rule takes its decays and betas from
//              n·w_aᵀ and n·w_bᵀ (gated_delta_rule/gated_delta_rule.hpp). With qkv-weights=packed
//              they are columns of one product, and of one convolution. With qkv-weights=grouped
//              w_qkvz has of each head of k the rows of q, k, and of its value heads those of v and
//              z, and w_ba those of b and a (gated_delta_mixer.cpp).
//
//   kda        the same with decays of features (Kimi Delta Attention) and sigmoid(n·w_zᵀ). With
//              `gate-rank` w_z and w_a multiply n·w_z_lowᵀ and n·w_a_lowᵀ
//
//   ssd        a = norm(core(conv(x), conv(B), conv(C)) ⊙ silu(z)), [z x B C dt] = n·w_inᵀ: conv
//              has SiLU behind it, and the core takes its steps from dt, within dt-min and dt-max
//              (ssd/ssd.hpp). The norm is one of each of `state-groups` parts of the features.
//
//   attention-ssd
//              attention and ssd on the same n, as in Falcon-H1: mid = (x + a·w_oᵀ) + s·w_ssm_outᵀ,
//              s being what ssd gives. ssm-heads and ssm-dim are the sizes of its heads. It has
//              caches and states.
//
// Factors of one layer's parts, as in Falcon-H1, are vectors in f32. With residual-scale=each
// out_scale, ssm_scale and ffn_scale multiply the results that products add to the residual. With
// in-scale=yes in_scale multiplies n·w_inᵀ of ssd. With gate-scale=yes gate_scale multiplies the
// gates of the network in front of their activation. mixer-norm=none leaves out the norm of ssd
// behind its gate.
//
// A layer may have one of its halves alone (Mamba-2, Nemotron-H): with ffn=none y is the sum behind
// the mixer, and with mixer=none the network takes x, as in
//
//   y = x + ffn(norm(x))
//
// act=relu2, of networks without gates, is relu(x)² (Primer): experts and a network beside them
// then have no gates either.
//
// The state of conv is a tensor of the layer, which is updated in place, in the order of
// transformers' caches: conv_state [batch, channels, width] with the last inputs of each sequence,
// zeros before its first token. That of gated-delta-rule and kda is `states` [batch, v-heads, dim,
// v-dim] in f32, the one of sequence i at state_indices[i], and conv_state [batch, heads · dim · 2
// + v-heads · v-dim, width]. With separate weights views of it, conv_q_state, conv_k_state and
// conv_v_state, have their channels. ssd has `states` [batch, heads, dim, state-dim], and
// conv_state of the channels of x, B and C. Such layers have no positions, slots and lengths. With
// conv-indices=yes state_indices find the states of convolutions too: a sequence whose index is at
// most null-index, -1 or 0, keeps all its states.
//
// Caches of states may have more entries than there are sequences (`states`), which are parts of
// pages: state-block and conv-block are the elements from one to the next. With state-layout=vk a
// state of gated-delta-rule or kda is [v-heads, v-dim, dim], and with conv-order=entries that of a
// convolution [conv-entries, channels]: so vLLM keeps them, with conv-entries = width - 1.
//
// A layer is made of the stages of other ops, its parts (registry/op.hpp): the norms, the mixer's,
// linear, all-reduce, ffn, or moe-route and moe-ffn. It has no kernels of its own, and no
// definition but theirs.
//
// Token j of sequence i is row i·s + j of x and has the position positions[i·s + j] for RoPE. Its k
// and v go to row slots[i·s + j] of the caches, which is usually i·cache + position. The last of
// the new tokens is at the last of the sequence's lengths[i] keys.
//
// With the size `page` the caches are [pages, page, kv-heads, dim]: key t of sequence i is in page
// pages[i, t / page] at row t % page. Slots are rows of all pages. All layers share the table.
//
// With the size `layers`, tensors of layer i are called "layers.i.w_q" and so on. The buffers are
// in the order of the layers, so that their array is the table of addresses. Tensors that all
// layers share (x, positions, angles, slots, lengths, pages, group) come first, and y last.
//
// The layers of a plan differ only in their weights and caches. A model that alternates two kinds
// of layers, with and without a window, has two plans, which are run in turn.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.hpp"
#include "device/program.hpp"
#include "kernels/common/parameter_fields.hpp"
#include "registry/op.hpp"

namespace fftune {

struct persistent_config;
struct persistent_token;

/// Defined in layer/op.cpp; listed in kernels/catalog.cpp.
const Op& layer_op();

namespace layer {

/// Sizes that are divided by the ranks of a group.
inline std::vector<std::string> sharded_sizes() {
  return {"heads", "kv-heads", "h", "shared-h"};
}

/// Whether the feed-forward network is a mixture of experts: ffn=moe.
bool has_experts(const Problem& problem);
/// Whether there is a feed-forward network: no ffn=none.
bool has_network(const Problem& problem);
/// Whether attention keeps dense weights beside a network whose weights are packed or e4m3.
bool has_dense_attention(const Problem& problem);
/// Whether the weights of q, k and v and of the output product are packed.
bool packs_attention(const Problem& problem);

/// The problems of other ops that one layer is made of, in order. Throws Error(invalid_input) where
/// one of them refuses its fields.
std::vector<OpPart> parts_of(const Problem& problem);

/// The ops of all parts that there may be, by the names of the parts, with the stages that parts
/// have.
struct PartKind {
  std::string name;
  const Op& (*op)();
  std::vector<std::string> stages;
};
std::vector<PartKind> part_kinds();

/// Whether all layers of a plan share the tensor, such as x and positions.
bool is_shared(const std::string& name);
/// Whether the mixer of the layers has a cache; and whether it has a state of each sequence.
bool has_cache(const Problem& problem);
bool has_states(const Problem& problem);

/// Families of a norm together with the product behind it.
std::vector<const Family*> normed_products();

/// Families of the sum over a group's ranks together with the product in front of it.
std::vector<const Family*> sums();

/// The families that have all stages of layers, and all layers of a plan, in one launch: one for
/// each kind of feed-forward network and of weights. Those that serve decode steps too, with a
/// packed head or a dense one.
std::vector<const Family*> persistent_layers();
std::vector<const Family*> layers_of_tokens(bool packs_head);

/// The rest of a decode step, which one launch computes together with its layers.
struct DecodeStep {
  std::function<void(persistent_config&)> set_form;
  std::size_t lengths;  // the place of that tensor
  /// Sets the parameters of a launch with the first layers, and of one with the last.
  std::function<void(ParameterFields<persistent_token>, bool first, bool last)> set_fields;
};

/// The program of those families for the layers of a decode step. `places`: for each layer, which
/// tensor of the program is each of the op layer's.
Program persistent_program(const Problem& layers,
                           const std::vector<std::vector<std::size_t>>& places,
                           const DecodeStep& step, const DeviceFacts& facts, const Config& config);

/// Test data of a layer with experts, x [tokens, d] and w_router [experts, d], by which tokens are
/// routed as the option `routing` says. With independent random values the scores of a token's k-th
/// expert and the next one would be so close that rounding decides between them.
void set_routed_draw(const Problem& problem, TensorSpec& tensor);

/// Sizes and options of the layers of published models.
std::vector<KnownModel> known_models();

}  // namespace layer
}  // namespace fftune
