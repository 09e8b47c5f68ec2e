// Whole layers in one launch, for up to 8 tokens in decoding: one CTA on each SM, for all layers.
//
// A layer of a few tokens is a stream of weights, interrupted where every CTA needs the results of
// all others. Here the stream does not stop there. One warp of a CTA copies the CTA's share of all
// weights, and of the keys and values, in a fixed order into a pipeline of stages in shared memory,
// and waits only for free stages. The other warps run the MMAs; while they wait for other CTAs the
// pipeline fills.
//
//   warps 0 .. n-1  MMA warps, per layer:
//                     norm of x, q k v = rows of the product        -> qkv      [tokens, rows] f32
//                     heads' norms, rotation; new k, v -> caches; attention over a split of the
//                     keys
//                                                                   -> partial  of each split
//                     splits combined                               -> attended [tokens, q]
//                     output product + x                            -> mid      [tokens, d]
//                     experts: norm of mid, router                  -> logits   [tokens, experts]
//                     norm of mid, gate and up                      -> hidden   [tokens, h]
//                     down + mid                                    -> y        [tokens, d]
//                   and behind the last layer of a whole token:
//                     norm of y, rows of the head, best ids         -> parts    [CTAs, tokens]
//                     CTA 0: the next ids, and the sequences' state
//   warp n          producer: weights, keys and values -> pipeline (full and empty barriers);
//                     with experts it waits for the logits, and chooses those that it copies
//   warp n+1        cleaner: sets the buffers of the layer before to zero
//
// One layer's way through a CTA, from left to right. `=>` is where all CTAs wait for each other's
// words, and the stream goes on:
//
//   producer   w_qkv     keys, values          w_o      w_gate, w_up       w_down   next w_qkv ..
//   MMA warps  q k v =>  attention => combine  => output => gate, up    => down => next layer ..
//   words          qkv         partial  attended     mid           hidden     y
//   cleaner                                            zeroes the set of the layer before
//
// Rows of each product are split evenly among CTAs. Results that all CTAs read go through L2 with
// the flag in the data: a word is the complement of its values, which is never zero, because no
// computed value is a NaN of all ones. Readers poll a word until it is not zero: one round trip, no
// fence and no counter. Layers use three sets of buffers in turn. While a CTA computes gate and up,
// every CTA has finished the layer before, so the cleaner zeroes that layer's set. Its fence, and
// the reads and writes up to the set's next use two layers later, order the zeros before that use.
//
// A product begins with weights that the pipeline already has. Each MMA warp takes its part of the
// first stages to registers before it waits for the activations (`held`), so the pipeline goes on.
//
// Products: mma.sync with 16 rows of weights as A, tokens as the 8 columns of B. The order of k is
// permuted so that a lane reads 16 bytes of a row at once. A stage is 16 rows by `chunk` elements
// of k; each warp takes a part of it.
//
// With ranks the rows of the output product and of down are summands. The thread that has an
// element of the residual stream sends its summand to the thread of the same element on every peer,
// as a packet that holds the value and the number of the exchange, and adds theirs
// (common/peers.cuh). Nothing else changes: the peers' words are one more wait of a thread that
// stores mid or y. The cleaner of the first CTA exchanges greetings.
//
// All CTAs must be resident at the same time, so the launch is cooperative. Grid: config.blocks.
// Block: config.threads(). Shared memory: config.shared_bytes(). Workspace: zeros.
//
// The parts, in the order in which a reader may take them (layer/persistent/). Those of the
// configuration, which the host knows too, are listed in layer/persistent.cuh.
//
//   cta.cuh        the parameters as a thread sees them, and the CTA's share of each part
//   memory.cuh     values in shared memory, and the words that CTAs exchange
//   stream.cuh     the producer warp: which weights, keys and values, in which order
//   route.cuh      the producer's choice of experts
//   input.cuh      activations in front of a product, and their norm
//   product.cuh    stages times tokens: dense and packed weights
//   results.cuh    what follows a product: biases, activation, residual
//   attention.cuh  heads, new keys and values, attention over a split, and all splits combined
//   head.cuh       the best id of a whole token, and the state of its sequence
//
// This file has the loop over layers and products that the MMA warps run, the cleaner, and the
// kernel. The loop, run(), is long: one body serves all products, and its
// values stay in registers from one product to the next.
#include "layer/persistent/attention.cuh"
#include "layer/persistent/head.cuh"
#include "layer/persistent/results.cuh"
#include "layer/persistent/stream.cuh"

namespace fftune {

// Brings a layer's parameters to the SM's caches of constants before the other warps need them. A
// miss would wait behind the copies of weights. A warp writes what it read to a word of no use.
template <class T, persistent_config c>
__device__ __forceinline__ void touch_parameters(const persistent_cta<T, c>& cta, int layer) {
  using words_of_layer = u64[sizeof(cta.p.of[0]) / 8];
  const auto& words = reinterpret_cast<const words_of_layer&>(cta.p.of[layer]);
  u64 all = 0;
  for (int at = static_cast<int>(threadIdx.x % 32); at < static_cast<int>(sizeof(words) / 8);
       at += 32)
    all ^= words[at];
  write_value(cta.shared + c.statistics_at() + 31 * 4, static_cast<int>(all ^ all >> 32));
}

// Sets the buffers of the layer before to zero. One warp of each CTA.
template <class T, persistent_config c>
__device__ __forceinline__ void clean(const persistent_cta<T, c>& cta) {
  if constexpr (c.ranks > 0) {
    auto group = cta.group_of_launch();
    if (blockIdx.x == 0) group.greet(static_cast<int>(threadIdx.x % 32));
  }
  const i64 vectors = c.set_bytes(cta.p.cache) / 16;
  for (int layer = 0; layer < cta.p.layers; ++layer) {
    if (layer + 1 < cta.p.layers) touch_parameters(cta, layer + 1);
    named_barrier_sync(2, c.consumers() + 32);  // mid is there: all are past the layer before
    if (layer > 0) {
      u8* const set = cta.set_of(layer - 1);
      const i64 end = vectors * (blockIdx.x + 1) / c.blocks;
      for (i64 at = vectors * blockIdx.x / c.blocks + threadIdx.x % 32; at < end; at += 32)
        store(set + at * 16, vector16{});
      __threadfence();
    }
    named_barrier_arrive(3, c.consumers() + 32);
  }
}

// The MMA warps: what a CTA does with its share of every product.
template <class T, persistent_config c, class activation, class norm>
struct persistent_layers {
  using layout = persistent_cta<T, c>;
  using params = typename layout::params;
  using packed = persistent_packed_pointers;

  enum : int { qkv_product, out_product, router, gate_up, down, logits_product };

  using dense_weights = persistent_dense<T, c>;
  using layer_weights = persistent_packed<T, c, c.format>;
  using head_weights = persistent_packed<T, c, c.head_format>;
  static constexpr bool packs_all =
      c.packs_attention && c.packs_network && !c.has_experts() && (!c.has_head() || c.packs_head);

  // Whether all packed weights have the layout that the kernel reads.
  static __device__ __forceinline__ bool knows_weights(const layout& cta) {
    bool known = true;
    const auto read = [&](const void* codes, packed_code code, i64 n, int k) {
      known = known && is_packed(load_cached(codes), code, n, k);
    };
    if constexpr (c.packs()) {
#pragma unroll 1
      for (int at = threadIdx.x; at < cta.p.layers * packed::count; at += c.consumers()) {
        const int layer = at / packed::count, which = at % packed::count;
        const persistent_layer_pointers& of = cta.layer_of(layer);
        constexpr i64 experts = c.has_experts() ? layout::all_experts : 1;
        if constexpr (c.packs_attention) {
          if (which == packed::qkv) read(of.qkv[0], c.format.code, c.qkv_rows(), c.d);
          if (which == packed::out) read(of.out, c.format.code, c.d, c.q_rows());
        }
        if constexpr (c.packs_network) {
          if (which == packed::gate || which == packed::up)
            read(which == packed::gate ? of.gate : of.up, c.format.code, experts * c.h, c.d);
          if (which == packed::down) read(of.down, c.format.code, experts * c.d, c.h);
          if constexpr (c.own > 0) {
            const persistent_router_pointers& router = cta.p.of[layer].router;
            if (which == packed::own_gate || which == packed::own_up)
              read(which == packed::own_gate ? router.own_gate : router.own_up, c.format.code,
                   c.own * c.h, c.d);
            if (which == packed::own_down) read(router.own_down, c.format.code, c.d, c.own * c.h);
          }
        }
      }
    }
    if constexpr (c.packs_head)
      if (cta.chooses()) read(cta.p.token.head, c.head_format.code, c.vocab, c.d);
    return named_barrier_all(1, c.consumers(), known);
  }

  using results_of = persistent_results<T, c, activation>;
  using biases = typename results_of::biases;

  // Those of this thread's results of a product.
  static __device__ __forceinline__ biases load_biases(const layout& cta, const results_of& results,
                                                       const typename layout::pipeline& pipeline,
                                                       int layer, int product, int blocks) {
    biases biases;
    if constexpr (c.bias) {
      if (product == qkv_product) results.load_qkv_biases(biases, cta.layer_of(layer));
    }
    if constexpr (c.out_bias) {
      if (product == out_product) results.load_out_bias(biases, cta.layer_of(layer).out_bias);
    }
    if constexpr (c.router_bias) {
      if (product == router) results.load_router_bias(biases, cta.p.of[layer].router.bias);
    }
    if constexpr (c.expert_bias) {
      const bool of_network = product == gate_up || product == down;
      if (of_network && blocks > 0) {
        pipeline.wait();  // The stage has weights of the experts that the producer has chosen.
        if (product == gate_up)
          results.load_hidden_biases(biases, cta.p.of[layer].router);
        else
          results.load_down_biases(biases, cta.p.of[layer].router.down_bias);
      }
    }
    return biases;
  }

  static __device__ __forceinline__ void run(const layout& cta) {
    typename layout::pipeline pipeline{.most_in_flight = c.in_flight, .shared = cta.shared};
    const persistent_input<T, c, norm> input{cta};
    persistent_product<T, c, norm> matrix{cta, pipeline, input};
    persistent_attention<T, c> attention{cta, pipeline};
    const results_of results{cta};
    const persistent_head<T, c> head{cta};
    attention.read_once();
    auto group = cta.group_of_launch();
    const int out_rows = cta.rows_of_block(c.d, c.attention_unit());
    float residual = 0;
    {
      const int row = threadIdx.x / c.tokens, column = threadIdx.x % c.tokens;
      if (row < out_rows && !c.post_norms) {
        const T* const of_x = cta.row_of_x(column);
        if (!c.has_head() || of_x != nullptr)
          residual = to_float(of_x[cta.first_row(c.d, c.attention_unit()) + row]);
        if constexpr (c.has_head()) residual = to_float(cta.embedded(residual));
      }
      if constexpr (c.packs() || c.packs_head) {
        if (!knows_weights(cta)) residual = __uint_as_float(0x7fffffff);
      }
    }
    row_choice<layout::choice> best;
    row_scores<layout::choice> scores{c.caps_head ? cta.p.token.softcap : 0.0f};
    if constexpr (c.has_head()) {
      const int column = threadIdx.x % layout::token_places;
      if (cta.chooses() && column < c.tokens)
        scores.load({cta.p.token.temperature, cta.p.token.seeds, cta.p.token.steps}, column);
    }
    constexpr int ids_at_once = 16 * c.most_blocks();
    const int ids = c.has_head() ? cta.rows_of_block(c.vocab, c.head_unit()) : 0;
    input.fetch_norms(cta.layer_of(0).attn_norm, nullptr);
    const T* x = static_cast<const T*>(cta.p.x);
#pragma unroll 1
    for (int layer = 0; layer < cta.p.layers + (cta.chooses() ? 1 : 0); ++layer) {
      const persistent_layer_pointers& of = cta.layer_of(layer);
      const bool is_head = c.has_head() && layer == cta.p.layers;
      const bool end = layer + 1 == cta.p.layers && !cta.chooses() && !c.post_norms;
      u8* const set = cta.set_of(layer);
      T* const attended = reinterpret_cast<T*>(set + c.attended_at(cta.p.cache));
      T* const mid = reinterpret_cast<T*>(set + c.mid_at(cta.p.cache));
      T* const hidden = reinterpret_cast<T*>(set + c.hidden_at(cta.p.cache));
      float* const handed = reinterpret_cast<float*>(set + c.handed_at(cta.p.cache));
      float* const handed_ups = reinterpret_cast<float*>(set + c.handed_ups_at(cta.p.cache));
      T* const y = end ? static_cast<T*>(cta.p.y) : reinterpret_cast<T*>(set + c.y_at(cta.p.cache));
#pragma unroll 1
      for (int at = 0; at < (is_head           ? ceil_div(ids, ids_at_once)
                             : c.has_experts() ? 5
                                               : 4);
           ++at) {
        const int product = is_head ? logits_product : c.has_experts() || at < router ? at : at + 1;
        const int first_id = at * ids_at_once, some_ids = smaller(ids_at_once, ids - first_id);
        const int blocks = product == qkv_product
                               ? ceil_div(cta.rows_of_block(c.qkv_rows(), c.attention_unit()), 16)
                           : is_head           ? ceil_div(some_ids, 16)
                           : product == router ? ceil_div(cta.rows_of_block(c.router_rows(), 1), 16)
                           : product == gate_up ? cta.gate_up_blocks()
                           : product == down    ? cta.down_blocks()
                                                : ceil_div(out_rows, 16);
        const int k = product == out_product ? c.q_rows() : product == down ? c.hidden() : c.d;
        const T* const from = product == qkv_product   ? x
                              : product == out_product ? attended
                              : product == down        ? hidden
                              : is_head                ? x
                                                       : mid;
        const bool loads = is_head ? at == 0 : !c.has_experts() || product != gate_up;
        const bool normalises = product != out_product && product != down;
        const bool plain = product == qkv_product && layer == 0, by_slot = product == down;
        const bool of_network = product == gate_up || product == down;
        float* const given = product == down      ? cta.given_sums(handed)
                             : product == gate_up ? cta.given_ups(handed_ups)
                                                  : nullptr;
        const biases biases = load_biases(cta, results, pipeline, layer, product, blocks);
        if (!c.keeps_residual() && product == down) residual = results.residual_of(mid, true);
        if (c.packs_head && is_head)
          matrix.template multiply<head_weights>(from, k, blocks, normalises, plain, loads, by_slot,
                                                 given);
        else if ((c.packs_network && of_network) || (c.packs_attention && product < router))
          matrix.template multiply<layer_weights>(from, k, blocks, normalises, plain, loads,
                                                  by_slot, given);
        else if (!packs_all)
          matrix.template multiply<dense_weights>(from, k, blocks, normalises, plain, loads,
                                                  by_slot, given);
        if (product == qkv_product) {
          float* const qkv = reinterpret_cast<float*>(set);
          float* const partial = reinterpret_cast<float*>(set + c.partial_at());
          float* const logs = reinterpret_cast<float*>(set + c.logs_at(cta.p.cache));
          input.fetch_norms(of.ffn_norm, of.attn_post_norm);
          results.finish_qkv(biases, qkv);
          const auto sinks = attention.load_sinks(of.sinks);
          // Before this CTA's part of `attended`: with all of them the others set x to zero.
          if (!c.keeps_residual() && layer > 0) residual = results.residual_of(x, false);
          if (cta.keys > 0) attention.prepare_heads(of, qkv);
          cta.sync_consumers();
          attention.attend(of, partial, logs);
          attention.combine(partial, logs, sinks, attended);
        } else if (product == router) {
          if constexpr (c.has_experts())
            results.finish_router(biases, reinterpret_cast<float*>(set + c.router_at(cta.p.cache)));
        } else if (product == gate_up) {
          named_barrier_sync(3, c.consumers() + 32);
          if (c.post_norms || !end)
            input.fetch_norms(layer + 1 < cta.p.layers ? cta.layer_of(layer + 1).attn_norm
                              : cta.chooses()          ? cta.p.token.final_norm
                                                       : nullptr,
                              of.ffn_post_norm);
          results.finish_hidden(biases, handed_ups, hidden);
        } else if (is_head) {
          if constexpr (c.has_head()) head.finish_logits(best, scores, first_id, some_ids);
        } else {
          results.finish_residual(residual, product == down ? y : mid, product == down,
                                  product == down && end, biases, of.residual_scale, handed, group);
          if (product == out_product) named_barrier_arrive(2, c.consumers() + 32);
        }
      }
      x = y;
    }
    if constexpr (c.has_head()) {
      if (cta.chooses()) head.choose(best);
    }
    if constexpr (c.post_norms) {
      if (!cta.chooses()) {
        vector16 vectors[persistent_input<T, c, norm>::vectors_of(c.packs())];
        input.load(vectors, false, x, c.d, 0, c.d, true, false, true);
      }
    }
    // Thread 0 of each CTA has an element of every row of exchanges.
    if constexpr (c.ranks > 0)
      if (threadIdx.x == 0) {
        --group.epoch;
        group.finish();
      }
  }
};

template <class T, persistent_config config, class activation, class norm>
__global__ void __launch_bounds__(config.threads(), 1)
    persistent_layer(const __grid_constant__
                     typename persistent_layers<T, config, activation, norm>::params params) {
  extern __shared__ __align__(128) u8 shared[];
  const u32 base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < config.stages; ++stage) {
      barrier_init(base + 8 * stage, 1);
      barrier_init(base + 8 * (config.stages + stage), config.warps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const persistent_cta<T, config> cta(params, base);
  const int thread = static_cast<int>(threadIdx.x), others = config.consumers();
  if (thread < others) {
    take_registers<config.consumer_registers()>();
    persistent_layers<T, config, activation, norm>::run(cta);
  } else {
    give_registers<config.other_registers()>();
    if (thread < others + 32)
      persistent_stream<T, config>(cta).produce();
    else if (thread < others + 64)
      clean(cta);
  }
}

}  // namespace fftune
