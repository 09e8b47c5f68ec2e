#include "kernels/gemm/sm90/space.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/common/typed_space.hpp"
#include "kernels/gemm/launch.hpp"

namespace fftune::sm90 {
namespace {

/// The words of the parameter schedule, in the order of sm90_schedule.
constexpr std::array<std::string_view, 3> schedules{"cooperative", "pingpong", "swap_ab"};

sm90_schedule schedule_of(std::string_view word) {
  const auto at = std::find(schedules.begin(), schedules.end(), word);
  if (at == schedules.end())
    throw Error(ErrorKind::internal, fmt::format("sm90 has no schedule {}", word));
  return static_cast<sm90_schedule>(at - schedules.begin());
}

/// Whether C's columns may take wgmma's 64-row side.
bool may_swap(const Workload& work) {
  return !work.a_mn_major() && !work.b_mn_major() && work.tensors_per_stage == 1 &&
         !work.form.is_qkv();
}

/// Whether tiles of bm rows serve many problems. Those between are for one m each.
bool is_usual(int bm) {
  return bm == 8 || bm == 16 || bm == 32 || bm % 64 == 0;
}

/// Those beside the usual ones that are worth trying for the rows of many groups, which differ.
bool suits_groups(int bm) {
  return bm == 24 || bm == 48 || bm == 80 || bm == 96 || bm == 112 || bm == 144 || bm == 160 ||
         bm == 176 || bm == 208 || bm == 224;
}

constexpr std::array splits{1, 2, 4, 8};

/// Whether tiles are of a usual height that was timed for so many rows: with swap-AB for few.
bool timed_height(const Workload& work, const Tile& tile) {
  return is_usual(tile.bm) && (!tile.swap_ab() || work.rows <= 256);
}

/// Whether the tiles are few enough to share the k of each.
bool may_split(std::int64_t tiles, int split_k, int sms) {
  return split_k == 1 || (tiles < sms && tiles * split_k <= 2 * sms);
}

/// The rows that a tile has at the least, as every row of tiles reads B again.
std::int64_t least_height(const Workload& work) {
  return std::min<std::int64_t>(80, ceil_div(work.rows, 4));
}

/// The largest work of any SM, in elements of C, with tiles of bm x bn.
double busiest(const Workload& work, int sms, int bm, int bn, int split_k) {
  const std::int64_t tiles = work.row_tiles(bm) * ceil_div(work.n, bn) * work.results;
  return double(ceil_div(tiles * split_k, sms)) * bm * bn / split_k;
}

/// The least of that by usual tiles that registers can hold and that are not too low for L2.
double busiest_usual(const Workload& work, int sms) {
  double least = std::numeric_limits<double>::infinity();
  for (const int bm : {64, 128, 192, 256})
    for (const int bn : usual_columns)
      for (const int split_k : {1, 2, 4})
        if ((bm > 64 || work.m <= 128) && bm * bn * work.b_operands() <= 128 * 384 &&
            may_split(work.row_tiles(bm) * ceil_div(work.n, bn) * work.results, split_k, sms))
          least = std::min(least, busiest(work, sms, bm, bn, split_k));
  return least;
}

/// Whether no lower tile than one of `height` rows covers the rows with as few tiles, for the
/// expected rows of a random mask's groups and for usual draws beside them. The CTAs of a split
/// reduce a tile together if each has a whole number of 8 rows; of many rows only such tiles count
/// for it then.
bool covers_most(const Workload& work, std::int64_t height, int split_k) {
  const std::int64_t step = work.m > 128 && height % (8 * split_k) == 0 ? 8 * split_k : 8;
  // The lowest that the limit of B's reads allows is covered by none.
  if (height - step < least_height(work)) return true;
  const auto saves = [&](std::int64_t first_rows) {
    return work.row_tiles(height, first_rows) < work.row_tiles(height - step, first_rows);
  };
  return saves(work.first_group_rows) ||
         (work.deviation > 0 && (saves(work.drawn_first_rows(-usual_deviations)) ||
                                 saves(work.drawn_first_rows(usual_deviations))));
}

/// Shared memory of a CTA but for groups and row indices.
std::int64_t ungrouped_bytes(const sm90_plan& plan) {
  return 1024 + plan.reduction_barrier_at + 8;
}

/// The rows of the largest table of row indices.
constexpr int most_index_rows = 256;

/// A configuration whose plan is computed where a constraint or the cost asks for it.
class Draft {
 public:
  explicit Draft(const gemm_form& form) : form_(form) {}

  const Tile& tile() const { return tile_; }
  const sm90_plan& plan() const { return planned_ ? plan_ : planned(); }
  /// A plan with other numbers of stages, which place what is in shared memory and decide no more.
  const sm90_plan& shape() const { return shaped_ ? plan_ : planned(); }

  /// A field that the plan depends on, but for those below.
  template <auto field>
  static void set(Draft& draft, std::int64_t value) {
    set_stages<field>(draft, value);
    draft.shaped_ = false;
  }
  /// stages or epilogue_stages.
  template <auto field>
  static void set_stages(Draft& draft, std::int64_t value) {
    set_apart<field>(draft, value);
    draft.planned_ = false;
  }
  /// A field that the plan does not depend on.
  template <auto field>
  static void set_apart(Draft& draft, std::int64_t value) {
    draft.tile_.*field = static_cast<std::remove_reference_t<decltype(draft.tile_.*field)>>(value);
  }

 private:
  const sm90_plan& planned() const {
    planned_ = shaped_ = true;
    return plan_ = sm90_plan_of(form_, tile_);
  }

  gemm_form form_;
  Tile tile_;
  mutable sm90_plan plan_ = {};
  mutable bool planned_ = false, shaped_ = false;
};

using Drafts = TypedSpace<Draft>;
using Names = Drafts::Names;
/// Constraints outlive the function that makes them.
using SharedWorkload = std::shared_ptr<const Workload>;

/// A constraint whose predicate takes a Tile, or a Tile and its plan, and looks at the parameters
/// `reads` alone.
auto limits_of(Drafts& space) {
  return [&space](std::string reason, const Names& reads, auto holds) {
    space.constraint(std::move(reason), reads, [holds](const Draft& draft) {
      if constexpr (std::is_invocable_v<decltype(holds), const Tile&>)
        return holds(draft.tile());
      else
        return holds(draft.tile(), draft.plan());
    });
  };
}

void add_shape_constraints(Drafts& space, const SharedWorkload& work) {
  const gemm_form form = work->form;
  const int b_operands = work->b_operands();
  const auto limit = limits_of(space);
  limit(
      "each MMA warpgroup needs a multiple of 64 rows of the tile: rows of A, or of B with swap-AB",
      {"bm", "bn", "schedule", "mma_warpgroups"}, [](const Tile& t, const sm90_plan& plan) {
        return plan.rows % (64 * (t.pingpong() ? 1 : t.mma_warpgroups)) == 0;
      });
  limit(
      "without swap-AB a tile has 64 rows of A or more; with it, tiles of usual height have at "
      "most 128 rows and columns",
      {"bm", "bn", "schedule"}, [](const Tile& t) {
        if (!t.swap_ab()) return t.bm >= 64;
        return is_usual(t.bm) ? t.bm <= 128 && t.bn <= 128 : true;
      });
  limit("schedule=pingpong needs mma_warpgroups=2", {"schedule", "mma_warpgroups"},
        [](const Tile& t) { return !t.pingpong() || t.mma_warpgroups == 2; });
  limit(
      "the accumulators of all rows and B operands must fit in 232 registers a thread, or 160 with "
      "three MMA warpgroups",
      {"bm", "bn", "schedule", "mma_warpgroups"}, [=](const Tile& t, const sm90_plan& plan) {
        return plan.total_accumulators(form) <= (t.mma_warpgroups == 3 ? 128 : 192);
      });
  limit(
      "the accumulators, and the sums of split-K that a CTA reduces, must fit in 232 registers a "
      "thread",
      {"bm", "bn", "schedule", "mma_warpgroups", "split_k"},
      [=](const Tile& t, const sm90_plan& plan) {
        if (t.split_k == 1 || plan.reducers == 1 || t.mma_warpgroups == 3) return true;
        const int accumulators = plan.total_accumulators(form);
        return accumulators + accumulators / plan.reducers <= 208;
      });
  limit(
      "mma_warpgroups=3 is for tiles of 192 rows and up to 192 columns that two warpgroups cannot "
      "hold",
      {"bm", "bn", "schedule", "mma_warpgroups"}, [=](const Tile& t, const sm90_plan& plan) {
        return t.mma_warpgroups < 3 ||
               (plan.rows == 192 && plan.total_accumulators(form) >= 64 && plan.columns <= 192);
      });
  limit("with more than 512 rows of A, tiles below 64 x 128 wait for shared memory",
        {"bm", "bn", "schedule"}, [=, m = work->rows](const Tile& t) {
          return m <= 512 || t.bm * t.bn * b_operands >= 64 * 128;
        });
}

/// Clusters, split-K, operands' layouts, and what each excludes.
void add_cluster_constraints(Drafts& space, const SharedWorkload& work) {
  const auto limit = limits_of(space);
  limit("only one of cluster_m, cluster_n and split_k may be above 1",
        {"cluster_m", "cluster_n", "split_k"},
        [](const Tile& t) { return (t.cluster_m > 1) + (t.cluster_n > 1) + (t.split_k > 1) <= 1; });
  limit("schedule=pingpong excludes split-K, whose CTAs have one tile each",
        {"schedule", "split_k"}, [](const Tile& t) { return !t.pingpong() || t.split_k == 1; });
  const bool aligned = work->k % 64 == 0;
  limit(
      "with swap-AB, clusters that share an operand pay only if its rows are not aligned to cache "
      "lines, or for experts' tiles of more than 64 rows",
      {"bm", "schedule", "cluster_m", "cluster_n"}, [=](const Tile& t) {
        const bool shares = t.cluster_m * t.cluster_n > 1;
        if (!t.swap_ab() || !shares) return true;
        const bool experts = work->sorted_rows() && t.bm > 64;
        return experts || (!aligned && !is_usual(t.bm));
      });
  limit("each CTA of a cluster loads whole swizzle atoms of 8 rows of a shared operand",
        {"bm", "bn", "cluster_m", "cluster_n"}, [](const Tile& t) {
          return t.bm % (8 * t.cluster_n) == 0 && t.bn % (8 * t.cluster_m) == 0;
        });
  limit("a CTA loads an MN-major operand in slabs of 64 rows",
        {"bm", "bn", "cluster_m", "cluster_n"},
        [a = work->a_mn_major(), b = work->b_mn_major()](const Tile& t) {
          return (!a || t.bm / t.cluster_n % 64 == 0) && (!b || t.bn / t.cluster_m % 64 == 0);
        });
  limit(
      "schedule=swap_ab needs K-major operands, and has no epilogue for activation gradients and "
      "heads",
      {"schedule"}, [swaps = may_swap(*work)](const Tile& t) { return !t.swap_ab() || swaps; });
  limit("split-K excludes an epilogue that reads gate and up, which needs whole accumulators",
        {"split_k"}, [tensors = work->tensors_per_stage](const Tile& t) {
          return t.split_k == 1 || tensors == 1;
        });
}

void add_memory_constraints(Drafts& space, const SharedWorkload& work, const DeviceFacts& facts) {
  const gemm_form form = work->form;
  const auto limit = limits_of(space);
  space.constraint("epilogue_stages is at most the number of subtiles of a tile",
                   {"bm", "bn", "schedule", "mma_warpgroups", "split_k", "epilogue_stages"},
                   [](const Draft& d) { return d.tile().epilogue_stages <= d.shape().subtiles; });
  // Beside the largest tables of grouped forms.
  const std::int64_t most =
      facts.shared_bytes_per_block -
      (form.groups == grouping::none ? 0 : 8 + sm90_group_bytes(form, most_index_rows));
  space.constraint(
      fmt::format("stages * 128 bytes * (bm + {} bn), the epilogue stages and the split-K "
                  "reduction must fit in the {} bytes of shared memory that a CTA can have",
                  work->b_operands(), most),
      {"bm", "bn", "schedule", "mma_warpgroups", "split_k", "stages", "epilogue_stages"},
      [=](const Draft& d) {
        // Most of those that do not fit do not even with the operands alone.
        return d.tile().stages * d.shape().stage_bytes <= most && ungrouped_bytes(d.plan()) <= most;
      });
  limit(
      "the stages must use two thirds of the shared memory that there is: a shorter pipeline only "
      "waits longer",
      // Clusters leave an SM to one CTA.
      form.scales_k_blocks()
          ? Names{"bm", "bn", "schedule", "mma_warpgroups", "cluster_m", "cluster_n", "split_k",
                  "stages", "epilogue_stages"}
          : Names{"bm", "bn", "schedule", "mma_warpgroups", "split_k", "stages", "epilogue_stages"},
      [=](const Tile& t, const sm90_plan& plan) {
        return t.stages >= work->k_blocks(t) || t.stages >= 12 ||
               ungrouped_bytes(plan) * sm90_resident_ctas(form, plan) * 3 > most * 2;
      });
}

void add_problem_constraints(Drafts& space, const GemmProblem& gemm, const SharedWorkload& work,
                             const DeviceFacts& facts) {
  const auto limit = limits_of(space);
  const int sms = std::max(facts.multiprocessors, 1);
  limit(
      "tiles of fewer than 64 columns read A more often, and pay only where SMs would have no tile",
      {"bm", "bn"}, [=](const Tile& t) {
        return t.bn >= 64 || work->row_tiles(t.bm) * ceil_div(work->n, 64) < sms;
      });
  limit(
      "a width that is no multiple of 32 needs whole tiles without groups, and an epilogue that "
      "only stores",
      {"bm", "bn", "schedule", "mma_warpgroups"}, [=](const Tile& t, const sm90_plan& plan) {
        const bool plain = !work->grouped_rows() && work->tensors_per_stage == 1;
        return plain || t.swap_ab() || plan.wgmma_columns <= 32 || plan.wgmma_columns % 32 == 0;
      });
  // Each lies between two usual ones.
  static_assert(columns_between.size() + 1 == usual_columns.size());
  const auto heads_fit = [&gemm](int bn) { return gemm.epilogue.qkv.fits_heads(bn); };
  const bool heads_need_them =
      work->form.is_qkv() && std::ranges::none_of(usual_columns, heads_fit);
  limit(
      "a width between two usual ones must fill the waves of CTAs better than both, or be the only "
      "one that holds whole heads",
      {"bm", "bn", "split_k"}, [=](const Tile& t) {
        const auto at = std::ranges::find(columns_between, t.bn) - columns_between.begin();
        if (heads_need_them || at == std::ssize(columns_between)) return true;
        const auto most = [&](int bn) { return busiest(*work, sms, t.bm, bn, t.split_k); };
        const auto own = static_cast<std::size_t>(at);
        return most(t.bn) < most(usual_columns[own]) && most(t.bn) < most(usual_columns[own + 1]);
      });
  // Judged before the parameters behind the schedule: it rules out most numbers of rows.
  limit(
      "other tile heights need schedule=swap_ab, where wgmma has A in steps of 8 rows, bn of 64 or "
      "more, and more than 64 rows of A",
      {"bm", "bn", "schedule"}, [=](const Tile& t) {
        if (is_usual(t.bm)) return true;
        if (!t.swap_ab() || t.bn < 64) return false;
        if (work->sorted_rows()) return suits_groups(t.bm);
        if (work->m <= 64 || std::ranges::none_of(splits, [&](int split_k) {
              return covers_most(*work, t.bm, split_k);
            }))
          return false;
        // Few rows leave the tensor cores idle: the loaded padding counts.
        return work->m > 128 || work->row_tiles(t.bm) * t.bm <= work->row_tiles(64) * 64;
      });
  limit(
      "other tile heights must be the lowest, or the lowest that split_k divides, of as many tiles",
      {"bm", "split_k"}, [=](const Tile& t) {
        return is_usual(t.bm) || work->sorted_rows() || covers_most(*work, t.bm, t.split_k);
      });
  // Where C gets a scale for each 128 columns, a tile has all of them.
  const bool scales_c = work->form.finds_scales();
  limit("more than half of a tile would be padding", {"bm", "bn"},
        [=, least_bm = may_swap(*work) ? 8 : 64,
         least_bn = scales_c ? scale_block : 64](const Tile& t) {
          return (t.bm == least_bm || t.bm < 2 * work->rows) &&
                 (t.bn <= least_bn || t.bn < 2 * work->n);
        });
  limit("every row of tiles reads B again: at most four rows of tiles, or tiles of 80 rows or more",
        {"bm"}, [=](const Tile& t) { return t.bm >= least_height(*work); });
  limit("swap-AB with the usual tile heights pays for up to 256 rows of a group",
        {"bm", "schedule"}, [=](const Tile& t) {
          return !work->sorted_rows() || !is_usual(t.bm) || timed_height(*work, t);
        });
  limit("every CTA of a cluster needs a tile", {"bm", "bn", "cluster_m", "cluster_n"},
        [=](const Tile& t) {
          return work->row_tiles(t.bm) >= t.cluster_m && ceil_div(work->n, t.bn) >= t.cluster_n;
        });
  limit("split-K pays only for fewer tiles than SMs, with at most two CTAs for each SM",
        {"bm", "bn", "split_k"},
        [=](const Tile& t) { return may_split(work->tiles(t), t.split_k, sms); });
  limit("a split needs at least two K blocks", {"split_k"}, [=](const Tile& t) {
    return t.split_k == 1 || work->k * work->k_pairs() >= std::int64_t{128} * t.split_k;
  });
  // The loads of a CTA's next tile begin while it computes one; of experts' tiles there are many.
  const bool many = work->sorted_rows();
  limit("a pipeline longer than the main loop is never full",
        many ? Names{"bm", "bn", "split_k", "stages"} : Names{"split_k", "stages"},
        [=](const Tile& t) {
          return t.stages == 2 || t.stages <= work->k_blocks(t) + 1 ||
                 (many && work->tiles(t) >= 2 * sms && t.split_k == 1);
        });
  limit(
      "group_m=16 needs more tiles than SMs, and more than 8 rows of tiles: otherwise their order "
      "does not matter",
      {"bm", "bn", "group_m"}, [=](const Tile& t) {
        return t.group_m == 8 || (work->tiles(t) > sms && work->row_tiles(t.bm) > 8);
      });
}

void add_fp8_constraints(Drafts& space, const SharedWorkload& work, bool gathers_a) {
  const gemm_form form = work->form;
  const auto limit = limits_of(space);
  limit(
      "the accumulators, and those of the K block that is promoted, must fit in 232 registers a "
      "thread, or 160 with three MMA warpgroups",
      {"bm", "bn", "schedule", "mma_warpgroups"}, [=](const Tile& t, const sm90_plan& plan) {
        return plan.total_accumulators(form) + plan.columns / 2 <=
               (t.mma_warpgroups == 3 ? 112 : 192);
      });
  limit("a row of a stored subtile needs 32 bytes or more", {"bm", "bn", "schedule", "split_k"},
        [](const Tile&, const sm90_plan& plan) { return plan.subtile_n >= 32; });
  if (form.groups == grouping::rows)
    limit("rows of fp8 are gathered for each tile: no A reuse",
          gathers_a ? Names{"a_reuse"} : Names{}, [](const Tile& t) { return t.a_reuse == 1; });
  if (form.scales == scaling::tensor) return;
  if (form.scales == scaling::block)
    limit("bn must divide 128, so that all columns of a tile share one scale of B",
          {"bn", "schedule"}, [](const Tile& t) { return t.swap_ab() || scale_block % t.bn == 0; });
  limit("a thread holds the scale of each of its rows: 128 rows at most", {"bm", "schedule"},
        [](const Tile& t) { return !t.swap_ab() || t.bm <= 128; });
  if (!form.finds_scales()) return;
  limit("the 128 columns that share a scale of C must be in one warpgroup, or with swap-AB in two",
        {"bn", "schedule", "mma_warpgroups", "split_k"}, [](const Tile& t, const sm90_plan& plan) {
          if (t.swap_ab())
            return plan.warpgroup_rows % scale_block == 0 ||
                   (t.bn == scale_block && t.mma_warpgroups == 2);
          return t.bn == scale_block && t.split_k == 1;
        });
}

void add_heads(Drafts& space, const GemmProblem& gemm) {
  const auto limit = limits_of(space);
  limit("a tile needs whole heads, all of q, all of k or all of v", {"bn"},
        [qkv = gemm.epilogue.qkv](const Tile& t) { return qkv.fits_heads(t.bn); });
}

void add_grouped_rows(Drafts& space, const GemmProblem& gemm, const SharedWorkload& work) {
  const auto limit = limits_of(space);
  if (gemm.epilogue.has_group_terms())
    limit("split-K excludes biases and factors of groups, which need whole sums", {"split_k"},
          [](const Tile& t) { return t.split_k == 1; });
  const bool permutes = gathers(gemm) && work->form.source == group_source::routed;
  if (permutes) {
    space
        .parameter("pre_permute",
                   "1: a kernel before copies the rows into the order of the groups; 0: CTAs "
                   "gather those that are scattered",
                   Draft::set_apart<&Tile::pre_permute>, {0, 1})
        .when_absent(0);
    limit("pre_permute=1 pays for groups of 32 rows or more, whose copy many tiles read",
          {"pre_permute"},
          [rows = work->rows](const Tile& t) { return !t.pre_permute || rows >= 32; });
  }
  if (!gemm.a_sorted)
    limit("gathered rows cannot be multicast: cluster_n=1",
          permutes ? Names{"cluster_n", "pre_permute"} : Names{"cluster_n"},
          [](const Tile& t) { return t.cluster_n == 1 || t.pre_permute; });
  if (!gathers(gemm) || work->form.is_gradient()) return;
  space
      .parameter("a_reuse",
                 "tiles along n that a CTA computes one after the other with the same rows of A: "
                 "the first one's are gathered, and loaded by TMA from a copy for the others",
                 Draft::set_apart<&Tile::a_reuse>, {1, 2, 4, 8})
      .when_absent(1);
  limit("a_reuse above 1 excludes clusters and schedule=pingpong",
        {"schedule", "cluster_m", "cluster_n", "split_k", "a_reuse"},
        [](const Tile& t) { return t.a_reuse == 1 || (t.cluster_ctas() == 1 && !t.pingpong()); });
  limit("a_reuse is at most the number of tiles along n", {"bn", "a_reuse"},
        [n = work->n](const Tile& t) { return t.a_reuse <= ceil_div(n, t.bn); });
  if (!permutes) return;
  limit("pre_permute=1 leaves no rows to gather: a_reuse=1", {"pre_permute", "a_reuse"},
        [](const Tile& t) { return !t.pre_permute || t.a_reuse == 1; });
  limit(
      "a_reuse above 1 needs tiles of 128 rows or more: fewer are gathered again in less time than "
      "a copy takes",
      {"bm", "a_reuse"}, [](const Tile& t) { return t.a_reuse == 1 || t.bm >= 128; });
}

void add_grouped_reduction(Drafts& space, const GemmProblem& gemm, const SharedWorkload& work) {
  const auto limit = limits_of(space);
  if (work->form.source == group_source::routed)
    limit("split-K of a grouped reduction needs the two groups of a mask", {"split_k"},
          [](const Tile& t) { return t.split_k == 1; });
  if (!gathers(gemm)) return;
  space
      .parameter("pre_permute",
                 "1: a kernel before copies the tokens into the sorted order; 0: CTAs gather those "
                 "that are scattered",
                 Draft::set_apart<&Tile::pre_permute>, {0, 1})
      .when_absent(0)
      .parameter("gather_warps",
                 "warps of a CTA that gather: 2 of the producer warpgroup, or 4, which are a "
                 "warpgroup more",
                 Draft::set<&Tile::gather_warps>, {2, 4})
      .when_absent(2);
  limit("pre_permute=1 leaves no tokens to gather: gather_warps=2", {"pre_permute", "gather_warps"},
        [](const Tile& t) { return !t.pre_permute || t.gather_warps == 2; });
  limit(
      "gather_warps=4 leaves the threads of two MMA warpgroups 200 registers, for up to 128 "
      "accumulators and 192 columns",
      {"bm", "bn", "schedule", "mma_warpgroups", "gather_warps"},
      [form = work->form](const Tile& t, const sm90_plan& plan) {
        return t.gather_warps == 2 ||
               (t.mma_warpgroups == 2 && plan.total_accumulators(form) <= 128 && t.bn <= 192);
      });
}

}  // namespace

Tile::Tile(const Config& config) : Tile(ConfigReader(config)) {}

Tile::Tile(ConfigReader config)
    : sm90_config{.bm = config.get("bm"),
                  .bn = config.get("bn"),
                  .schedule = schedule_of(config.word("schedule")),
                  .mma_warpgroups = config.get("mma_warpgroups"),
                  .cluster_m = config.get("cluster_m"),
                  .cluster_n = config.get("cluster_n"),
                  .split_k = config.get("split_k"),
                  .stages = config.get("stages"),
                  .epilogue_stages = config.get("epilogue_stages"),
                  .a_reuse = config.get_or("a_reuse", 1),
                  .gather_warps = config.get_or("gather_warps", 2)},
      group_m(config.get("group_m")),
      pre_permute(config.get_or("pre_permute", 0) == 1) {}

std::string template_argument(const sm90_config& config) {
  const std::string_view schedule = schedules[static_cast<std::size_t>(config.schedule)];
  return StructText("sm90_config", "bm", config.bm, "bn", config.bn, "schedule",
                    fmt::format("fftune::sm90_schedule::{}", schedule), "mma_warpgroups",
                    config.mma_warpgroups, "cluster_m", config.cluster_m, "cluster_n",
                    config.cluster_n, "split_k", config.split_k, "stages", config.stages,
                    "epilogue_stages", config.epilogue_stages, "a_reuse", config.a_reuse,
                    "gather_warps", config.gather_warps);
}

bool gathers(const GemmProblem& gemm) {
  if (!gemm.groups.any() || !gemm.groups.scattered) return false;
  return gemm.groups.by == Grouping::rows ? !gemm.a_sorted : !(gemm.a_sorted && gemm.b_sorted);
}

namespace {

/// `bands`: the values of group_m.
Drafts drafts_of(const GemmProblem& gemm, const DeviceFacts& facts,
                 std::vector<std::int64_t> bands) {
  Workload work(gemm);
  // Each group's share of the tokens, which is what those of all groups come to.
  if (work.grouped_reduction()) work.k = ceil_div(work.k, work.groups);
  const auto shared = std::make_shared<const Workload>(std::move(work));
  Drafts space{Draft(shared->form)};
  std::vector<std::int64_t> rows;
  for (int bm = 8; bm <= 256; bm += 8) rows.push_back(bm);
  space.parameter("bm", "rows of a tile of C", Draft::set<&Tile::bm>, rows)
      .parameter("bn", "columns of a tile of C", Draft::set<&Tile::bn>,
                 {16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 256})
      .words("schedule",
             "cooperative: the MMA warpgroups share a tile; pingpong: each has one in turn; "
             "swap_ab: cooperative, with B on the 64-row side of wgmma",
             Draft::set<&Tile::schedule>, {schedules.begin(), schedules.end()})
      .parameter("mma_warpgroups", "warpgroups that issue wgmma", Draft::set<&Tile::mma_warpgroups>,
                 {1, 2, 3})
      .parameter("cluster_m", "CTAs along m that share B by multicast",
                 Draft::set<&Tile::cluster_m>, {1, 2})
      .parameter("cluster_n", "CTAs along n that share A by multicast",
                 Draft::set<&Tile::cluster_n>, {1, 2})
      .parameter("split_k", "CTAs of a cluster that share the k of a tile",
                 Draft::set<&Tile::split_k>,
                 gemm.batch_invariant ? std::vector<std::int64_t>{1}
                                      : std::vector<std::int64_t>(splits.begin(), splits.end()))
      .parameter("stages", "K blocks of 128 bytes a row that shared memory holds",
                 Draft::set_stages<&Tile::stages>, {2, 3, 4, 5, 6, 8, 12, 16})
      .parameter("epilogue_stages",
                 "subtiles of C between registers and memory, of each MMA warpgroup",
                 Draft::set_stages<&Tile::epilogue_stages>, {1, 2, 4})
      .parameter("group_m", "tile rows in a band of the raster order",
                 Draft::set_apart<&Tile::group_m>, std::move(bands));
  add_shape_constraints(space, shared);
  add_cluster_constraints(space, shared);
  add_memory_constraints(space, shared, facts);
  add_problem_constraints(space, gemm, shared, facts);
  if (shared->form.is_qkv()) add_heads(space, gemm);
  if (shared->grouped_rows()) add_grouped_rows(space, gemm, shared);
  if (shared->promotes())
    add_fp8_constraints(space, shared, shared->grouped_rows() && gathers(gemm));
  if (shared->grouped_reduction()) add_grouped_reduction(space, gemm, shared);
  return space;
}

}  // namespace

Space space(const GemmProblem& gemm, const DeviceFacts& facts) {
  return drafts_of(gemm, facts, {8, 16}).space();
}

Config default_config(const GemmProblem& gemm, const DeviceFacts& facts) {
  // Tiles of other heights were timed where they fill the waves better than every usual tile. The
  // others, and swap-AB of many rows, must be ahead by more than the model's usual error.
  constexpr double untimed_factor = 1.03;
  const Workload work(gemm);
  const int sms = std::max(facts.multiprocessors, 1);
  const bool has_untimed = !work.sorted_rows() && !work.grouped_reduction() && work.m > 128;
  const double usual = has_untimed ? busiest_usual(work, sms) : 0;
  const auto factor_of = [&](const Tile& t) {
    const bool timed = !has_untimed || timed_height(work, t) ||
                       (!is_usual(t.bm) && busiest(work, sms, t.bm, t.bn, t.split_k) < usual);
    return timed ? 1 : untimed_factor;
  };
  CostModel model(gemm, facts);
  double least = std::numeric_limits<double>::infinity();
  int stages = 0;
  std::optional<Config> best;
  // Without more rows of tiles than a band has, and for sorted rows, the model does not read
  // group_m, and the first of equals counts.
  drafts_of(gemm, facts, {8, 16}).for_each_feasible([&](const Draft& draft, const auto& config) {
    const Tile& tile = draft.tile();
    const double factor = factor_of(tile);
    if (factor * model.least_cycles(tile, draft.plan()) > least) return;
    const double cost = factor * model.cycles(tile, draft.plan());
    if (best && (cost > least || (cost == least && tile.stages <= stages))) return;
    least = cost;
    stages = tile.stages;
    best = config();
  });
  if (!best) throw Error(ErrorKind::internal, "the space of sm90 is empty");
  return std::move(*best);
}

}  // namespace fftune::sm90
