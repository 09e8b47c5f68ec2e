// Tile schedulers of the sm_90a GEMM: which tiles of C a CTA computes, one after the other, and of
// each which K blocks. Every role of the kernel walks a scheduler of its own, to the same tiles.
//
//   dense_scheduler      a persistent grid; with split-K one tile a cluster, a share of k a CTA
//   rows_scheduler       the same over tiles of rows of one group each (group_tiles)
//   reduction_scheduler  the tiles of every group's C; k is the tokens of a group
//
//   is_valid()           there is a tile; next(n) goes to the n-th after it
//   tile()               the work tile
//   group(tile)          whose B it takes; first_row(tile): its first row of A
//   rows(tile)           the rows of A and C that it has
//
// row_of_c(tile) is the first row of C of a tile that has all rows; skip_tile(pipe) advances a
// pipeline past the K blocks of a tile.
#pragma once

#include "common/types.cuh"
#include "gemm/form.cuh"
#include "gemm/groups.cuh"
#include "gemm/sm90/config.cuh"

namespace fftune {

// Compile-time parameters of a kernel.
template <gemm_form form_, sm90_config config_>
struct sm90_traits {
  static constexpr gemm_form form = form_;
  static constexpr sm90_config config = config_;
  static constexpr sm90_plan plan = sm90_plan_of(form_, config_);
  static constexpr bool dense = form.groups == grouping::none;
  static constexpr bool grouped_rows = form.groups == grouping::rows;
  static constexpr bool reduction = form.groups == grouping::reduction;
  static constexpr bool routed = !dense && form.source == group_source::routed;
  static constexpr bool splits_k = config.split_k > 1;
  // Rows that may have to be gathered: of A, in a grouped reduction of either operand.
  static constexpr bool gathers =
      grouped_rows ? !form.a_sorted : reduction && !(form.a_sorted && form.b_sorted);
  // Whether the index warp has to look for rows: for loads, or for stores to C in the tokens'
  // order.
  static constexpr bool finds_rows = gathers || (grouped_rows && !form.c_sorted);
  static constexpr bool reuses_a = config.a_reuse > 1;
  static constexpr bool promotes = form.scales != scaling::none;
  static constexpr bool scaled = form.scales_k_blocks();  // The producers copy scales too.
  using groups = groups_of<form_.source, form_.ready>;
  using group_tiles = fftune::group_tiles<groups, group_tiling{config_.bm, config_.cluster_m,
                                                               sm90_levels_tiles(form_, config_)}>;
};

// The groups of a dense GEMM.
struct no_groups {};

// The K blocks [first, last) of a CTA.
struct k_range {
  int first, last;

  __device__ __forceinline__ int count() const { return last - first; }
};

struct work_tile {
  u32 m, n;  // in tiles
  int row;   // dense: its first row of A and C
  k_range k;
  int group;             // grouped reduction: whose C it is
  int output;            // which of two
  u32 reducer, senders;  // grouped reduction with split-K: the CTA that finishes it, and a bit for
                         // each other that has a part
};

// Clusters take tiles round-robin, in the order of grouped_tile(); with split-K a cluster has one
// tile.
template <class Traits>
class tile_raster {
  static constexpr sm90_config config = Traits::config;
  static constexpr u32 ctas = config.cluster_ctas();
  u32 clusters_m_, clusters_n_, group_m_, index_, step_, count_;
  // Experts' tiles in fp8 may take less time than the divisions that place them.
  static constexpr bool divides_once = Traits::form.scales_k_blocks();
  struct no_dividers {
    __device__ __forceinline__ no_dividers(u32, u32, u32) {}
  };
  struct dividers {
    divider of_row, of_band;    // tiles of a row, and of a band
    divider of_group, of_last;  // rows of a whole band, and of the last

    __device__ __forceinline__ dividers(u32 tiles_m, u32 tiles_n, u32 group_m)
        : of_row(tiles_n),
          of_band(group_m * tiles_n),
          of_group(group_m),
          of_last(tiles_m % group_m == 0 ? group_m : tiles_m % group_m) {}
  };
  typename choose_type<divides_once, dividers, no_dividers>::type by_;

 public:
  __device__ __forceinline__ tile_raster(int m, int n, int group_m)
      : clusters_m_(ceil_div(static_cast<u32>(m), static_cast<u32>(config.bm * config.cluster_m))),
        clusters_n_(ceil_div(static_cast<u32>(n), static_cast<u32>(config.bn * config.cluster_n))),
        group_m_(group_m),
        by_(clusters_m_, clusters_n_, group_m) {
    index_ = blockIdx.x / ctas;
    step_ = gridDim.x / ctas;
    count_ = clusters_m_ * clusters_n_;
  }
  __device__ __forceinline__ bool is_valid() const { return index_ < count_; }
  __device__ __forceinline__ void next(u32 tiles) { index_ += tiles * step_; }
  __device__ __forceinline__ tile_position position(u32 rank) const {
    return of_cta(in_bands(index_, clusters_m_), rank);
  }
  // For groups of rows with an order of their own, one group after the other: the first tile of a
  // row in the same group, and the position in a group whose rows of tiles are `count` from `first`
  // on.
  __device__ __forceinline__ u32 row_of_group() const {
    if constexpr (divides_once) return by_.of_row.quotient(index_) * config.cluster_m;
    return index_ / clusters_n_ * config.cluster_m;
  }
  __device__ __forceinline__ tile_position position(u32 rank, u32 first, u32 count) const {
    first /= config.cluster_m;
    const tile_position at = in_bands(index_ - first * clusters_n_, count / config.cluster_m);
    return of_cta({first + at.m, at.n}, rank);
  }

 private:
  static __device__ __forceinline__ tile_position of_cta(const tile_position& at, u32 rank) {
    if constexpr (config.split_k > 1) return at;
    return {at.m * config.cluster_m + rank / config.cluster_n,
            at.n * config.cluster_n + rank % config.cluster_n};
  }
  // Position in bands of `rows` rows of clusters: all of them, or those of a group.
  __device__ __forceinline__ tile_position in_bands(u32 index, u32 rows) const {
    if constexpr (divides_once) {  // as grouped_tile()
      const u32 band = by_.of_band.quotient(index), first_m = band * group_m_;
      const u32 in_band = index - band * group_m_ * clusters_n_, left = rows - first_m;
      const u32 column = left >= group_m_      ? by_.of_group.quotient(in_band)
                         : left == 1           ? in_band
                         : rows == clusters_m_ ? by_.of_last.quotient(in_band)
                                               : in_band / left;
      return {first_m + in_band - column * smaller(left, group_m_), column};
    }
    return grouped_tile(index, rows, clusters_n_, group_m_);
  }
};

// K blocks of a CTA over k elements, `pairs` times: K-concatenated operands follow each other.
template <class Traits>
__device__ __forceinline__ k_range k_range_of(int k, u32 rank) {
  constexpr int split_k = Traits::config.split_k, pairs = Traits::form.k_pairs();
  constexpr u32 bk = Traits::plan.bk;
  const u32 blocks = ceil_div(static_cast<u32>(k), bk) * pairs;
  if constexpr (split_k == 1) return {0, static_cast<int>(blocks)};
  return {static_cast<int>(blocks * rank / split_k),
          static_cast<int>(blocks * (rank + 1) / split_k)};
}

template <class Traits>
class dense_scheduler {
  static constexpr gemm_form form = Traits::form;
  static constexpr sm90_config config = Traits::config;
  const gemm_params& params_;
  u32 rank_;
  tile_raster<Traits> raster_;

  // The tiles of two outputs are below each other, in whole clusters.
  static __device__ __forceinline__ u32 output_rows(int m) {
    return ceil_div(static_cast<u32>(m), static_cast<u32>(config.bm * config.cluster_m)) *
           config.cluster_m;
  }
  static __device__ __forceinline__ int raster_m(int m) {
    if constexpr (form.outputs() == 1) return m;
    return static_cast<int>(2 * output_rows(m) * config.bm);
  }

  // A CTA that loaded only the rows that there are would run ahead of those that share its B:
  // requests that come together are one to the L2, and apart each is one. So the last tile of rows
  // is a whole one too, and computes some rows again, to the same bits. Not where a source is added
  // or read: that may be the same memory as C.
  static __device__ __forceinline__ int whole_tile(int row, int m) {
    if constexpr (form.a_major == major::k && !form.adds_source && !form.is_gradient()) {
      if (row < m && row + config.bm > m) return m > config.bm ? m - config.bm : 0;
    }
    return row;
  }

 public:
  __device__ __forceinline__ dense_scheduler(const gemm_params& params, const no_groups&, u32 rank)
      : params_(params), rank_(rank), raster_(raster_m(params.m), params.n, params.group_m) {}

  __device__ __forceinline__ bool is_valid() const { return raster_.is_valid(); }
  __device__ __forceinline__ void next(u32 tiles) { raster_.next(tiles); }
  __device__ __forceinline__ work_tile tile() const {
    tile_position at = raster_.position(rank_);
    int output = 0;
    if constexpr (form.outputs() == 2) {
      if (at.m >= output_rows(params_.m)) {
        output = 1;
        at.m -= output_rows(params_.m);
      }
    }
    const int row = whole_tile(static_cast<int>(at.m) * config.bm, params_.m);
    return {at.m, at.n, row, k_range_of<Traits>(params_.k, rank_), 0, output, 0, 0};
  }
  template <class Groups>
  static __device__ __forceinline__ int tokens_left(const Groups&, const work_tile&) {
    return 0;
  }
  __device__ __forceinline__ int group(const work_tile&) const { return 0; }
  __device__ __forceinline__ bool is_first_of_group() const { return false; }
  __device__ __forceinline__ int first_row(const work_tile& tile) const { return tile.row; }
  __device__ __forceinline__ int row_of_c(const work_tile& tile) const { return tile.row; }
  __device__ __forceinline__ group_tile rows(const work_tile& tile) const {
    return {0, 0, tile.row, params_.m - tile.row};
  }
  template <class Pipeline>
  __device__ __forceinline__ void skip_tile(Pipeline& pipe) const {
    pipe.advance(tile().k.count());
  }
};

// A tile's rows lie at first_row(tile) in the sorted order. With A reuse a CTA takes a_reuse tiles
// side by side along n one after the other, and what it gathered for the first serves all.
template <class Traits>
class rows_scheduler {
  static constexpr sm90_config config = Traits::config;
  static constexpr int reuse = config.a_reuse;
  static_assert(reuse == 1 || (config.cluster_ctas() == 1 && !config.pingpong()));
  using group_tiles = typename Traits::group_tiles;
  static constexpr bool routed = Traits::form.source == group_source::routed;
  static constexpr bool in_warps = Traits::form.scales_k_blocks();  // all roles are whole warps
  const gemm_params& params_;
  const group_tiles& tiles_;
  u32 rank_, columns_;

  // Where it is. Among many groups a tile's is searched for, once.
  struct place {
    tile_raster<Traits> raster;
    u32 turn = 0;
    tile_position at = {};  // of routed groups, as rows
    group_tile rows = {};
    bool first_of_group = false;
  };
  place place_;

  static __device__ __forceinline__ int columns_of(int n) { return ceil_div(n, config.bn); }

  // CTAs that share B run together where a group's tiles follow each other.
  __device__ __forceinline__ void look_up(place& to) const {
    if constexpr (routed) {
      if (!to.raster.is_valid()) return;
      const u32 row = to.raster.row_of_group();
      const group_span own = in_warps ? tiles_.span_in_warp(row) : tiles_.span(row);
      to.at = to.raster.position(rank_, own.first, own.count);
      to.rows = tiles_.at(own, to.at.m);
      to.first_of_group = to.at.m - own.first < config.cluster_m;
    }
  }
  __device__ __forceinline__ tile_position at() const {
    if constexpr (routed) return place_.at;
    return place_.raster.position(rank_);
  }

 public:
  // As many columns as there are runs of tiles that reuse A.
  static __device__ __forceinline__ int raster_n(int n) {
    if constexpr (reuse == 1) return n;
    return ceil_div(columns_of(n), reuse) * config.bn;
  }
  __device__ __forceinline__ rows_scheduler(const gemm_params& params, const group_tiles& tiles,
                                            u32 rank)
      : params_(params),
        tiles_(tiles),
        rank_(rank),
        columns_(columns_of(params.n)),
        place_{{static_cast<int>(tiles.count()) * config.bm, raster_n(params.n), params.group_m}} {
    look_up(place_);
  }

  __device__ __forceinline__ bool is_valid() const { return place_.raster.is_valid(); }
  __device__ __forceinline__ work_tile tile() const {
    tile_position own = at();
    if constexpr (reuse > 1) own.n = own.n * reuse + place_.turn;
    return {own.m, own.n, 0, k_range_of<Traits>(params_.k, rank_), 0, 0, 0, 0};
  }
  template <class Groups>
  static __device__ __forceinline__ int tokens_left(const Groups&, const work_tile&) {
    return 0;
  }
  __device__ __forceinline__ int group(const work_tile& tile) const { return rows(tile).group; }
  __device__ __forceinline__ int first_row(const work_tile& tile) const { return rows(tile).first; }
  __device__ __forceinline__ group_tile rows(const work_tile& tile) const {
    if constexpr (routed) return place_.rows;
    return tiles_.at(tile.m);
  }
  // Whether the cluster's rows are the first ones of their group.
  __device__ __forceinline__ bool is_first_of_group() const { return place_.first_of_group; }
  // Whether the tile is the first or the last of its rows here.
  __device__ __forceinline__ bool first() const { return place_.turn == 0; }
  __device__ __forceinline__ bool last() const {
    return reuse == 1 || place_.turn + 1 == reuse || tile().n + 1 >= columns_;
  }
  __device__ __forceinline__ place here() const { return place_; }
  // Where the next tile is, past `tiles - 1` others, which are of other rows.
  __device__ __forceinline__ place after(u32 tiles) const {
    place then = place_;
    if (last()) {
      then.turn = 0;
      then.raster.next(tiles);
      look_up(then);
    } else {
      ++then.turn;
    }
    return then;
  }
  __device__ __forceinline__ void go(const place& then) { place_ = then; }
  __device__ __forceinline__ void next(u32 tiles) { go(after(tiles)); }
  __device__ __forceinline__ void next_rows() {
    place_.turn = 0;
    place_.raster.next(1);
    look_up(place_);
  }
  template <class Pipeline>
  __device__ __forceinline__ void skip_tile(Pipeline& pipe) const {
    pipe.advance(tile().k.count());
  }
};

// Every group has a C. With two groups by a mask, the tiles of the group with more tokens come
// first, because they take longer. With split-K, a cluster has the tiles of both groups at each
// place of C instead. Its CTAs share all K blocks there equally, in that order of the groups: the
// same work under every mask, and most CTAs have K blocks of one tile alone. The first CTA finishes
// the longer group's tile, the last one the other's.
template <class Traits>
class reduction_scheduler {
  static constexpr gemm_form form = Traits::form;
  static constexpr sm90_config config = Traits::config;
  static constexpr bool by_mask = form.source == group_source::mask;
  static constexpr int outputs = form.outputs();
  static constexpr bool shares = config.split_k > 1;
  static constexpr u32 ctas = config.split_k;
  static constexpr int tokens_of_k_block = sm90_reduction_tokens;
  static_assert(!shares || by_mask);
  using groups_type = typename Traits::groups;
  const gemm_params& params_;
  const groups_type& groups_;
  u32 rank_;
  tile_raster<Traits> raster_;
  int part_ = 0;  // where k is shared: 0 is the longer group's tile, 1 the other's

  static __device__ __forceinline__ u32 output_rows(int m) {
    return ceil_div(static_cast<u32>(m), static_cast<u32>(config.bm * config.cluster_m)) *
           config.cluster_m;
  }
  __device__ __forceinline__ int k_blocks_of(int group) const {
    return ceil_div(groups_.count(group), tokens_of_k_block);
  }
  __device__ __forceinline__ int longer_group() const {
    if constexpr (!by_mask) return 0;
    return 2 * groups_.count(0) >= groups_.rows() ? 0 : 1;
  }
  // A CTA's range of `longer` and then `shorter` K blocks: those of part 0 or 1.
  static __device__ __forceinline__ k_range part_range(int longer, int shorter, int part, u32 cta) {
    const u32 all = longer + shorter;
    const int first = ceil_div(all * cta, ctas), last = ceil_div(all * (cta + 1), ctas);
    if (part == 0) return {smaller(first, longer), smaller(last, longer)};
    return {larger(first - longer, 0), larger(last - longer, 0)};
  }
  static __device__ __forceinline__ int raster_m(const groups_type& groups, int m) {
    const int tiles_of_c = shares ? 1 : groups.groups();
    return static_cast<int>(tiles_of_c * outputs * output_rows(m) * config.bm);
  }

 public:
  __device__ __forceinline__ reduction_scheduler(const gemm_params& params,
                                                 const groups_type& groups, u32 rank)
      : params_(params),
        groups_(groups),
        rank_(rank),
        raster_(raster_m(groups, params.m), params.n, params.group_m) {}

  __device__ __forceinline__ bool is_valid() const { return raster_.is_valid(); }
  __device__ __forceinline__ void next(u32 tiles) {
    if (shares) part_ ^= 1;
    if (part_ == 0) raster_.next(tiles);
  }
  // A CTA may have no K block of it; but its reducer then has one past the last, which is all
  // zeros.
  __device__ __forceinline__ work_tile tile() const {
    const tile_position at = raster_.position(rank_);
    work_tile own{at.m, at.n, 0, {}, 0, 0, rank_, 0};
    const u32 rows = output_rows(params_.m);
    const u32 index = own.m / rows;
    own.m -= index * rows;
    const int longer = longer_group();
    own.group = !by_mask                                  ? static_cast<int>(index / outputs)
                : (shares ? part_ == 0 : index < outputs) ? longer
                                                          : 1 - longer;
    own.output = outputs == 2 && index % 2 == 1;
    const int k_blocks = k_blocks_of(own.group);
    own.k = {0, k_blocks};
    if constexpr (shares) {
      const int most = k_blocks_of(longer), least = k_blocks_of(1 - longer);
      own.k = part_range(most, least, part_, rank_);
      own.reducer = part_ == 0 ? 0 : ctas - 1;
#pragma unroll
      for (u32 cta = 0; cta < ctas; ++cta) {
        const k_range range = part_range(most, least, part_, cta);
        if (cta != own.reducer && range.first < range.last) own.senders |= 1u << cta;
      }
    }
    if (rank_ == own.reducer && own.k.count() == 0) own.k = {k_blocks, k_blocks + 1};
    return own;
  }
  __device__ __forceinline__ int row_of_c(const work_tile& tile) const {
    return static_cast<int>(tile.m) * config.bm;
  }
  template <class Pipeline>
  __device__ __forceinline__ void skip_tile(Pipeline& pipe) const {
    if (is_valid()) pipe.advance(tile().k.count());
  }
  // Up to `most` tokens of a group from K block `k_block` on; none past the group's last.
  __device__ __forceinline__ group_tile tokens(int group, int k_block, int most) const {
    const int rank = k_block * tokens_of_k_block, left = groups_.count(group) - rank;
    return {group, rank, groups_.first(group) + rank, smaller(left, most)};
  }
  // From the first K block of the CTA to the end of the group.
  static __device__ __forceinline__ int tokens_left(const groups_type& groups,
                                                    const work_tile& tile) {
    return groups.count(tile.group) - tile.k.first * tokens_of_k_block;
  }
};

// The scheduler of a form, and the groups whose tiles it walks.
template <class Traits, grouping groups = Traits::form.groups>
struct scheduler_of {
  using type = dense_scheduler<Traits>;
  using domain = no_groups;
};
template <class Traits>
struct scheduler_of<Traits, grouping::rows> {
  using type = rows_scheduler<Traits>;
  using domain = typename Traits::group_tiles;
};
template <class Traits>
struct scheduler_of<Traits, grouping::reduction> {
  using type = reduction_scheduler<Traits>;
  using domain = typename Traits::groups;
};

// How an MMA warpgroup steps to its next tile: when it is needed, or ahead.
template <class Scheduler>
struct step_when_needed {
  __device__ __forceinline__ explicit step_when_needed(const Scheduler&) {}
  __device__ __forceinline__ void look_ahead(const Scheduler&, u32) {}
  __device__ __forceinline__ void next(Scheduler& work, u32 tiles) const { work.next(tiles); }
};
// Where the next tile lies among many groups takes hundreds of clocks to find. The last MMAs of the
// tile before cover them.
template <class Scheduler>
struct step_ahead {
  decltype(static_cast<const Scheduler*>(nullptr)->here()) then;

  __device__ __forceinline__ explicit step_ahead(const Scheduler& work) : then(work.here()) {}
  __device__ __forceinline__ void look_ahead(const Scheduler& work, u32 tiles) {
    then = work.after(tiles);
  }
  __device__ __forceinline__ void next(Scheduler& work, u32) const { work.go(then); }
};
template <class Traits, bool ahead = Traits::grouped_rows&& Traits::routed && !Traits::promotes>
struct step_of {
  using type = step_when_needed<typename scheduler_of<Traits>::type>;
};
template <class Traits>
struct step_of<Traits, true> {
  using type = step_ahead<typename scheduler_of<Traits>::type>;
};

}  // namespace fftune
