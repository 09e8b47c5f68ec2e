// The producer warp of the persistent form of layers: which weights, keys and values of each layer
// go through the pipeline, in the order in which the MMA warps take them, and what L2 takes ahead.
//
// produce() is long, because it is that order: a layer's steps, one after the other.
#pragma once

#include "layer/persistent/cta.cuh"
#include "layer/persistent/route.cuh"

namespace fftune {

template <class T, persistent_config c>
struct persistent_stream {
  using layout = persistent_cta<T, c>;
  using W = typename layout::W;
  typename layout::pipeline pipeline;
  const layout& cta;

  explicit __device__ __forceinline__ persistent_stream(const layout& of)
      : pipeline{.most_in_flight = c.in_flight, .shared = of.shared}, cta(of) {}

  // Block by block of `of_block` rows. Rows from `boundary` on are of `more`.
  struct run {
    const void *from, *more;
    int rows, more_rows;
    int pitch = 0;  // elements from a row to the next; 0: k
  };
  template <class RunOf>
  __device__ __forceinline__ void load_weights(int k, int blocks, int places, const RunOf& run_of) {
    for (int begin = 0; begin < k; begin += c.input_length()) {
      const int end = smaller(k, begin + c.input_length());
      for (int block = 0; block < blocks; ++block) {
        const run of = run_of(block);
        for (int at = begin; at < end; at += c.chunk)
          pipeline.load(static_cast<const u8*>(of.from) + c.weight_bytes(at), of.rows,
                        static_cast<const u8*>(of.more) + c.weight_bytes(at), of.more_rows,
                        places == 0 ? of.rows : places, c.weight_bytes(of.pitch > 0 ? of.pitch : k),
                        c.weight_bytes(smaller(c.chunk, end - at)), layout::row_stride);
      }
    }
  }
  // The same of packed weights, a tile of 16 rows after the other; from the element `first` of k
  // on.
  struct packed_run {
    packed_matrix of;
    i64 tile;
    int first = 0;
  };
  template <packed_form format, class RunOf>
  __device__ __forceinline__ void load_packed(int k, int tiles, const RunOf& run_of) {
    constexpr packed_stage_shape shape = c.packed_stage(format);
    for (int begin = 0; begin < k; begin += c.input_length()) {
      const int end = smaller(k, begin + c.input_length());
      for (int tile = 0; tile < tiles; ++tile) {
        const packed_run of = run_of(tile);
        for (int at = begin; at < end; at += shape.k())
          load_packed_stage<shape>(pipeline, of.of, of.tile, of.first + at,
                                   of.first + smaller(end, at + shape.k()));
      }
    }
  }
  using packed = persistent_packed_pointers;
  // A packed weight of a layer, whose codes are at `codes`.
  __device__ __forceinline__ packed_matrix packed_of(int layer, int which, const void* codes,
                                                     int k) const {
    const packed& of = cta.p.of[layer].packed;
    return {static_cast<const u8*>(codes), static_cast<const u8*>(of.scales[which]),
            of.zeros[which], k};
  }
  __device__ __forceinline__ void load_keys(const persistent_layer_pointers& of) {
    const int there = larger(0, smaller(cta.keys, cta.first_new));
    const auto page_of = [&](int key) {
      return cta.p
          .pages[static_cast<i64>(cta.sequence) * ceil_div(cta.p.cache, c.page) + key / c.page];
    };
    [[maybe_unused]] int next_page = 0;
    if constexpr (c.page > 0) {
      if (cta.keys > 0) next_page = page_of(cta.first_key);
    }
    for (int block = 0; block < cta.keys; block += 16) {
      const int rows = smaller(16, there - block), key = cta.first_key + block;
      i64 row = static_cast<i64>(cta.sequence) * cta.p.cache + key;
      if constexpr (c.page > 0) {
        const int page = next_page;
        if (block + 16 < cta.keys) next_page = page_of(key + 16);
        if (static_cast<u32>(page) >= static_cast<u32>(cta.p.page_count)) {
          pipeline.load_zeros(rows, layout::key_bytes, layout::key_stride);
          pipeline.load_zeros(rows, layout::key_bytes, layout::value_stride);
          continue;
        }
        row = static_cast<i64>(page) * c.page + key % c.page;
      }
      const i64 at = row * c.cache_row() + cta.head_group * c.own_kv_heads() * c.kv_head;
      const auto load = [&](const void* cache, u32 stride) {
        const auto* const from = reinterpret_cast<const u8*>(static_cast<const T*>(cache) + at);
        if constexpr (c.kv_head == c.dim)
          pipeline.load(from, rows, nullptr, 0, 0, 2 * c.cache_row(), layout::key_bytes, stride);
        else
          pipeline.load_pieces(from, rows, 2 * c.cache_row(), c.own_kv_heads(), 2 * c.kv_head,
                               2 * c.dim, stride);
      };
      load(of.keys, layout::key_stride);
      load(of.values, layout::value_stride);
    }
  }

  __device__ __forceinline__ void produce() {
    const int qkv = cta.first_row(c.qkv_rows(), c.attention_unit()),
              qkv_rows = cta.rows_of_block(c.qkv_rows(), c.attention_unit());
    const int out = cta.first_row(c.d, c.attention_unit()),
              out_rows = cta.rows_of_block(c.d, c.attention_unit());
    const int down = cta.first_down(), down_rows = cta.down_rows();
    const int hidden = cta.first_hidden(), of_hidden = cta.hidden_rows();
    for (int layer = 0; layer < cta.p.layers; ++layer) {
      const persistent_layer_pointers& of = cta.layer_of(layer);
      if constexpr (c.packs_attention) {
        load_tiles(packed_of(layer, packed::qkv, of.qkv[0], c.d), qkv, qkv_rows);
      } else {
        load_weights(c.d, ceil_div(qkv_rows, 16), 0, [&](int block) {
          const int first = qkv + block * 16, rows = smaller(16, qkv_rows - block * 16);
          if constexpr (c.packed_qkv)
            return run{cta.row_at(of.qkv[0], first, c.d), nullptr, rows, 0};
          const int part = cta.part_of(first), next = cta.first_of(part + 1);
          const int own = smaller(rows, next - first);
          return run{cta.row_at(of.qkv[part], first - cta.first_of(part), c.d),
                     part < 2 ? of.qkv[part + 1] : nullptr, own, rows - own};
        });
      }
      // Four exchanges between CTAs follow, and the pipeline is full before them.
      pipeline.most_in_flight = c.attention_in_flight;
      if constexpr (layout::looks_ahead && c.has_experts())
        look_at_next(layer + 1, qkv, qkv_rows, out, out_rows);
      else if constexpr (layout::looks_ahead)
        look_at_network(of);
      load_keys(of);
      const auto rows_of = [&](const void* matrix, int k, int first, int rows) {
        return [=](int block) {
          return run{layout::row_at(matrix, first + block * 16, k), nullptr,
                     smaller(16, rows - block * 16), 0};
        };
      };
      if constexpr (c.packs_attention)
        load_tiles(packed_of(layer, packed::out, of.out, c.q_rows()), out, out_rows);
      else
        load_weights(c.q_rows(), ceil_div(out_rows, 16), 0,
                     rows_of(of.out, c.q_rows(), out, out_rows));
      if constexpr (c.has_experts()) {
        const persistent_router_pointers& router = cta.p.of[layer].router;
        const int first_logit = cta.first_row(c.router_rows(), 1),
                  rows = cta.rows_of_block(c.router_rows(), 1);
        load_weights(c.d, rows > 0 ? 1 : 0, 0, [&](int) {
          const int of_experts = larger(0, smaller(rows, c.experts - first_logit));
          return run{cta.row_at(router.weights, first_logit, c.d), router.own_weight, of_experts,
                     rows - of_experts};
        });
        choose_experts(cta, static_cast<const float*>(router.choice_bias), layer, pipeline.idle);
        if constexpr (c.packs_network) {
          load_packed_experts(of, layer, router);
          continue;
        }
        pipeline.most_in_flight = c.in_flight;
        const i64 stride = static_cast<i64>(c.packed_gate_up ? 2 : 1) * c.h;
        load_weights(c.d, of_hidden / 8, 8, [&](int block) {
          const int first = hidden + block * 8, expert = cta.expert_of(first / c.h);
          if (c.own > 0 && expert >= layout::all_experts) {
            const i64 row = static_cast<i64>(expert - layout::all_experts) * c.h + first % c.h;
            return run{cta.row_at(router.own_gate, row, c.d), cta.row_at(router.own_up, row, c.d),
                       8, 8};
          }
          if (c.interleaved)
            return run{cta.row_at(of.gate, 2 * (static_cast<i64>(expert) * c.h + first % c.h), c.d),
                       nullptr, 16, 0};
          const i64 row = expert * stride + first % c.h;
          return run{
              cta.row_at(of.gate, row, c.d),
              c.packed_gate_up ? cta.row_at(of.gate, row + c.h, c.d) : cta.row_at(of.up, row, c.d),
              8, 8};
        });
        for (int block = 0; block < ceil_div(down_rows, 16); ++block)
          for (int slot = 0; slot < c.slots(); ++slot)
            load_weights(c.h, 1, 0, [&](int) {
              const int expert = cta.expert_of(slot), rows = smaller(16, down_rows - block * 16);
              if (c.own > 0 && expert >= layout::all_experts)
                return run{static_cast<const W*>(
                               cta.row_at(router.own_down, down + block * 16, c.own * c.h)) +
                               (expert - layout::all_experts) * c.h / stream_type<W>::packed,
                           nullptr, rows, 0, c.own * c.h};
              return run{
                  cta.row_at(of.down, static_cast<i64>(expert) * c.d + down + block * 16, c.h),
                  nullptr, rows, 0};
            });
        continue;
      }
      if constexpr (c.packs_network) {
        load_packed<c.format>(c.d, of_hidden / 8, [&](int block) {
          if (block > 1) pipeline.most_in_flight = c.in_flight;
          if constexpr (layout::looks_ahead) look_from(block / 2 * 16);
          const i64 tile = hidden / 16 + block / 2;
          return block % 2 == 0 ? packed_run{packed_of(layer, packed::gate, of.gate, c.d), tile}
                                : packed_run{packed_of(layer, packed::up, of.up, c.d), tile};
        });
        pipeline.most_in_flight = c.in_flight;
        load_tiles(packed_of(layer, packed::down, of.down, c.h), down, down_rows);
        continue;
      }
      const auto gate_up = [&](int block) {
        const int first = hidden + block * 8, rows = smaller(8, of_hidden - block * 8);
        if (block > 0) pipeline.most_in_flight = c.in_flight;
        if constexpr (layout::looks_ahead) look_from(block * 8);
        return run{cta.row_at(of.gate, first, c.d), cta.row_at(of.up, first, c.d), rows, rows};
      };
      load_weights(c.d, ceil_div(of_hidden, 8), 8, gate_up);
      pipeline.most_in_flight = c.in_flight;
      load_weights(c.h, ceil_div(down_rows, 16), 0, rows_of(of.down, c.h, down, down_rows));
    }
    if constexpr (c.has_head()) {
      if (!cta.chooses()) return;
      const int first = cta.first_row(c.vocab, c.head_unit()),
                rows = cta.rows_of_block(c.vocab, c.head_unit());
      if constexpr (c.packs_head)
        load_packed<c.head_format>(c.d, ceil_div(rows, 16), [&](int tile) {
          return packed_run{
              {static_cast<const u8*>(cta.p.token.head),
               static_cast<const u8*>(cta.p.token.head_scales), cta.p.token.head_zeros, c.d},
              first / 16 + tile};
        });
      else
        load_weights(c.d, ceil_div(rows, 16), 0, [&](int block) {
          return run{cta.row_at(cta.p.token.head, first + block * 16, c.d), nullptr,
                     smaller(16, rows - block * 16), 0};
        });
    }
  }

  // L2 takes gate and up of this CTA.
  __device__ __forceinline__ void look_at_network(const persistent_layer_pointers& of) {
    const i64 from = static_cast<i64>(cta.first_hidden()) * network_row_bytes +
                     (c.packs_network ? packed_part_bytes : 0);
    pipeline.idle.first = static_cast<const u8*>(of.gate) + from;
    pipeline.idle.second = static_cast<const u8*>(of.up) + from;
    look_from(0);
  }
  // Bytes of a row of gate or up, which are the codes of a packed one.
  static constexpr int network_row_bytes =
      c.packs_network ? packed_k_blocks(c.d) * c.packed_stage(c.format).block_bytes() / packed_rows
                      : c.weight_bytes(c.d);
  // The same from row `row` on, where the stream is.
  __device__ __forceinline__ void look_from(int row) {
    const int begin = row * network_row_bytes, end = cta.hidden_rows() * network_row_bytes;
    l2_ahead& to = pipeline.idle;
    to.at = row == 0 ? 0 : larger(to.at, begin);
    to.first_end = to.second_end = smaller(end, begin + c.ahead);
  }
  // The experts are not known before the router: L2 takes what the next layer begins with. The
  // pipeline has the first rows of q, k and v before that layer begins, and of the output product
  // before that.
  __device__ __forceinline__ void look_at_next(int layer, int qkv, int qkv_rows, int out,
                                               int out_rows) {
    l2_ahead& to = pipeline.idle;
    to = {};
    if (layer == cta.p.layers) return;
    if constexpr (c.packs_network) {
      const auto skip = [](int& first, int& rows, int k) {
        const int there = c.stages / ceil_div(k, c.chunk) * 16;
        if (rows > there) first += there, rows -= there;
      };
      skip(qkv, qkv_rows, c.d);
      skip(out, out_rows, c.q_rows());
    }
    const persistent_layer_pointers& next = cta.layer_of(layer);
    const int part = c.packed_qkv ? 0 : cta.part_of(qkv);
    const int end = c.packed_qkv ? c.qkv_rows() : cta.first_of(part + 1);
    const auto limit = [](int rows, int k) { return smaller(rows * c.weight_bytes(k), c.ahead); };
    to.first = static_cast<const u8*>(cta.row_at(next.qkv[part], qkv - cta.first_of(part), c.d));
    to.first_end = limit(smaller(qkv_rows, end - qkv), c.d);
    to.second = static_cast<const u8*>(cta.row_at(next.out, out, c.q_rows()));
    to.second_end = limit(out_rows, c.q_rows());
  }

  // A CTA's tiles of a packed weight, `rows` rows from `first` on.
  __device__ __forceinline__ void load_tiles(const packed_matrix& of, int first, int rows) {
    load_packed<c.format>(of.k, rows / 16, [&](int tile) {
      return packed_run{of, first / 16 + tile};
    });
  }

  // Tiles of gate and up in turn, then those of down of each slot.
  __device__ __forceinline__ void load_packed_experts(const persistent_layer_pointers& of,
                                                      int layer,
                                                      const persistent_router_pointers& router) {
    const auto is_own = [](int expert) { return c.own > 0 && expert >= layout::all_experts; };
    pipeline.most_in_flight = c.in_flight_of(c.d);
    const int tiles = cta.first_gate_up();
    load_packed<c.format>(c.d, cta.end_gate_up() - tiles, [&](int block) {
      const int tile = tiles + block, first = tile / 2 * 16, expert = cta.expert_of(first / c.h);
      const bool own = is_own(expert), up = tile % 2 != 0;
      const void* const codes =
          own ? (up ? router.own_up : router.own_gate) : (up ? of.up : of.gate);
      const int which = (own ? packed::own_gate : packed::gate) + (up ? 1 : 0);
      const i64 part = own ? expert - layout::all_experts : expert;
      return packed_run{packed_of(layer, which, codes, c.d), (part * c.h + first % c.h) / 16};
    });
    pipeline.most_in_flight = c.in_flight_of(c.h);
    const int end = cta.end_down_part();
    for (int part = cta.first_down_part(); part < end; ++part)
      load_packed<c.format>(c.h, 1, [&](int) {
        const int tile = part / c.slots(), expert = cta.expert_of(part % c.slots());
        if (is_own(expert))
          return packed_run{packed_of(layer, packed::own_down, router.own_down, c.own * c.h), tile,
                            (expert - layout::all_experts) * c.h};
        return packed_run{packed_of(layer, packed::down, of.down, c.h),
                          static_cast<i64>(expert) * (c.d / 16) + tile};
      });
    pipeline.most_in_flight = c.in_flight;
  }
};

}  // namespace fftune
