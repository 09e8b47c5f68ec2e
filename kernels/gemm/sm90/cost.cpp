// The cost model of the sm90 engine.
//
// The constants were fitted to the times of 3,200 variants of ffn's and masked-ffn's stages on an
// H200 (tests/data/landscapes) and of the records of its presets. Those of sorted groups were
// fitted to 1,000 variants of moe-ffn's. The predicted fastest variant of a landscape is within 1%
// of the real one in the mean, and within 7% in the worst case. Those of experts in fp8 were fitted
// to 100 variants on an H100 (tests/data/landscapes-h100), and the rate of loads, which differs
// between the two devices, also to the records of the H100's presets.
#include <algorithm>
#include <cmath>

#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/sm90/space.hpp"

namespace fftune::sm90 {
namespace {

/// A configuration of a workload, with its plan.
struct Candidate {
  const Workload& work;
  const Tile& t;
  const sm90_plan& plan;
  /// Whether powers may be rounded otherwise, for a fraction of the time.
  bool fast = false;

  int resident() const { return sm90_resident_ctas(work.form, plan); }
};

/// The time of two kinds of work that overlap; the more equal they are, the less they overlap:
/// (first^s + second^s)^(1/s) of the sharpness s.
template <int sharpness>
double overlapped(const Candidate& c, double first, double second) {
  static_assert(sharpness == 3 || sharpness == 4 || sharpness == 8);
  if (!c.fast)
    return std::pow(std::pow(first, sharpness) + std::pow(second, sharpness), 1. / sharpness);
  const double more = std::max(first, second), ratio = std::min(first, second) / more;
  const double squared = ratio * ratio;
  if constexpr (sharpness == 3) return more * std::cbrt(1 + squared * ratio);
  if constexpr (sharpness == 4) return more * std::sqrt(std::sqrt(1 + squared * squared));
  const double fourth = squared * squared;
  return more * std::sqrt(std::sqrt(std::sqrt(1 + fourth * fourth)));
}

/// Memory bandwidth of the whole device.
double bytes_a_clock(const DeviceFacts& facts) {
  const double clock = facts.clock_hz > 0 ? facts.clock_hz : 1.7e9;
  const double bandwidth = facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12;
  return bandwidth / clock;
}

/// Whether rows of `extent` two-byte elements begin lines of the L2, of 128 bytes; others begin
/// anywhere in one, and 128 bytes of them touch two.
bool starts_lines(std::int64_t extent) {
  return extent % 64 == 0;
}

/// Rows of 128 bytes that a CTA requests from L2 for each K block. Multicast rows are requested
/// once. A row that begins within a line touches two lines, and its requests are not merged with
/// those of neighbouring rows as whole lines' are.
double rows_asked(const Candidate& c) {
  const auto& [work, t, plan, fast] = c;
  const auto cost = [](std::int64_t extent) { return starts_lines(extent) ? 1 : 1.9; };
  return t.bm * cost(work.a_mn_major() ? work.m : work.k) / t.cluster_n +
         double(work.b_operands()) * t.bn * cost(work.b_mn_major() ? work.n : work.k) / t.cluster_m;
}

/// Columns of a wgmma. Tiles of a group that have about as many rows each are as wide as these
/// need.
double wgmma_columns(const Candidate& c) {
  const auto& [work, t, plan, fast] = c;
  const double widest = plan.wgmma_columns;
  if (!sm90_levels_tiles(work.form, t)) return widest;
  constexpr double steps = 16;  // of a width
  const double tiles = static_cast<double>(work.row_tiles(t.bm * t.cluster_m) * t.cluster_m);
  const double rows = static_cast<double>(work.m) / tiles;
  return std::min(rows + steps / 2, widest);
}

/// Clocks of promoting fp8 accumulators, per k16 step: a warpgroup waits for its MMAs, an m64 tile
/// and an operand at a time, and only another one has the tensor cores meanwhile. Scales of K
/// blocks come from shared memory behind the stage's barrier. Those of sorted rows, and what their
/// narrow tiles save, are counted elsewhere.
double promotion_cycles(const Candidate& c) {
  if (!c.work.promotes()) return 0;
  const bool shares_tiles = !c.t.pingpong() && c.t.mma_warpgroups > 1;
  const double each = (shares_tiles ? 150 : 220) * c.plan.m64_tiles * c.work.b_operands();
  if (c.work.promotes_sorted_rows()) return each / 4 / c.resident();
  const double columns = std::min(c.plan.wgmma_columns, 128) / 128.0;
  const double factors = !c.work.form.scales_k_blocks() ? 0 : shares_tiles ? 220 : 80;
  return (each * (0.5 + 0.5 * columns) + factors * columns) / 4 / c.resident();
}

/// Clocks in which the warps of a CTA find out about an expert's tile, before its first MMA and
/// again to store it, and of these stores; and of finding the scales of its rows.
double placing_cycles(const Candidate& c) {
  if (!c.work.promotes_sorted_rows()) return 0;
  // With swap-AB the columns of a scale are with all threads, else with the four of a row.
  const double each_row = c.t.swap_ab() ? 40 : 10;
  return (1200.0 + (c.work.form.finds_scales() ? each_row * c.t.bm : 0)) / c.resident();
}

constexpr double sm_rate = 73;  // bytes a clock, into one SM

/// Bytes a clock into each SM where all of them ask. Some of these come from memory, so the rate
/// depends on it: 52 on an H200 and 48 on an H100. There, tiles of 128 x 256 are ahead of 128 x 128
/// by 4 to 6% more.
double device_rate(const DeviceFacts& facts) {
  return 40 + bytes_a_clock(facts) / std::max(facts.multiprocessors, 1) * 2 / 3;
}

/// Clocks in which a CTA takes in the bytes of one k16 step, and waits for them where the pipeline
/// is short. `busy`: the share of the SMs that have a CTA.
double intake_cycles(const Candidate& c, const DeviceFacts& facts, double busy) {
  constexpr double load_latency = 500;  // clocks from a stage that is free to one that is full,
  constexpr double row_latency = 5.2;   // and for each row of 128 bytes
  const auto& [work, t, plan, fast] = c;
  const double rows = t.bm + double(work.b_operands()) * t.bn;
  // CTAs that share A wait for the slowest of them.
  const double sharing = t.cluster_n > 1 ? 1.12 : 1;
  const double intake =
      sharing * 32 *
      std::max(rows / sm_rate, busy * std::max(rows, rows_asked(c)) / device_rate(facts));
  // The promotion of a K block of a large tile of experts leaves its loads time.
  const double waited = work.promotes_sorted_rows() && t.bm > 64 ? 0.7 : 1;
  const double latency =
      waited * (load_latency + row_latency * rows) / 4 / std::max(t.stages - 1, 1);
  return overlapped<4>(c, intake, latency);
}

/// Relative slowdown of a step if few CTAs request the same lines at about the same time. This
/// concerns CTAs with a share of k each, unless they have the tiles of two groups (grouped
/// reductions), and CTAs of a group with a single row of tiles, whose B no other row reads. The
/// more of the device is busy, the more the others wait for these.
double unshared(const Candidate& c, double busy) {
  constexpr double longer = 0.3;
  if (c.t.split_k > 1) return c.work.grouped_reduction() ? 1 : 1 + longer;
  const bool alone = c.work.groups_with_rows() == 2 && c.work.fewest_row_tiles(c.t.bm) == 1;
  return alone ? 1 + longer * busy : 1;
}

/// Clocks of one k16 step in a CTA whose operands are loaded by TMA.
double step_cycles(const Candidate& c, const DeviceFacts& facts, double busy) {
  constexpr double shared_rate = 128;  // bytes a clock
  constexpr double efficiency = 0.75;  // of the tensor cores under load, at a clock that yields
  const auto& [work, t, plan, fast] = c;
  const int b_operands = work.b_operands();
  // wgmma m64nNk16 takes N/2 clocks and reads 2 KiB + 32 N bytes.
  const double width = wgmma_columns(c);
  const double instructions =
      double(plan.rows) / 64 * b_operands * plan.columns / plan.wgmma_columns;
  // A lone warpgroup waits for an A whose columns are contiguous: on an H100, ping-pong tiles of
  // 192 x 128 took 1.25 times as long as cooperative ones of 256 x 128.
  const bool alone = t.pingpong() || t.mma_warpgroups == 1;
  const double a_bytes = work.a_mn_major() && alone ? 9700 : 2048;
  const double wgmma = std::max(width / 2 / efficiency, (a_bytes + 32 * width) / shared_rate);
  const double intake = intake_cycles(c, facts, busy);
  // Data delivered by the L2 takes power from the MMAs.
  const double promotion = promotion_cycles(c);
  if (work.promotes_sorted_rows())
    return unshared(c, busy) * (overlapped<8>(c, instructions * wgmma, intake) + 0.02 * intake) +
           promotion;
  return unshared(c, busy) *
         (overlapped<8>(c, instructions * wgmma + promotion, intake) + 0.02 * intake);
}

/// The same where rows are gathered, and stored for A reuse if there is any.
double gathering_step_cycles(const Candidate& c, double loaded) {
  const auto& [work, t, plan, fast] = c;
  // Weight gradients gather two operands, and more neighbouring bytes of each row.
  const bool reduction = work.a_mn_major() && work.b_mn_major();
  const double rate = reduction ? 36 : 18;  // bytes a clock, by cp.async
  // Each 32 bytes take a cycle of shared memory; the MMAs leave about half of these.
  // The rows of sorted groups are listed, and not searched for.
  const double gathering = c.work.sorted_rows()  ? 0.1
                           : t.gather_warps == 4 ? 0.26
                           : reduction           ? 0.4
                                                 : 0.45;
  constexpr double storing = 0.35;
  const double rows = (work.gathers_a ? t.bm : 0) + (work.gathers_b ? work.b_operands() * t.bn : 0);
  if (rows == 0) return loaded;
  // With few stages the copies and the MMAs do not overlap.
  return std::max(loaded + (work.a_reuse > 1 ? gathering + storing : gathering) * rows,
                  rows * 32 / rate + loaded / std::max(t.stages - 1, 1));
}

/// Clocks in which all CTAs at once read and store the rows of A that they reuse.
double reuse_cycles(const Candidate& c, const DeviceFacts& facts) {
  constexpr double efficiency = 0.6;  // of the memory, by scattered reads and writes
  const auto& [work, t, plan, fast] = c;
  if (work.a_reuse == 1) return 0;
  const double runs = static_cast<double>(work.runs(t));
  const double ctas = std::min<double>(runs, static_cast<double>(facts.multiprocessors));
  const double rows = ctas * static_cast<double>(work.row_tiles(t.bm)) / runs * t.bm;
  return rows * static_cast<double>(work.k) * 2 * 2 / (efficiency * bytes_a_clock(facts));
}

/// Clocks until each CTA of a split has the accumulators that the others made for it. A single
/// reducer has them while it is busy.
double reduction_cycles(const Candidate& c) {
  constexpr double rate = 16;  // bytes a clock, into a CTA
  const auto& [work, t, plan, fast] = c;
  if (work.grouped_reduction()) return 0;
  return double(t.split_k - 1) * plan.rows * plan.reduced_columns * work.b_operands() * 4 / rate;
}

/// How many clusters run at once. Those of more than two CTAs do not fill every GPC: an H200 has 30
/// of 4 and 15 of 8.
std::int64_t clusters_at_once(const Tile& t, const DeviceFacts& facts) {
  const std::int64_t whole = facts.multiprocessors / t.cluster_ctas();
  return std::max<std::int64_t>(t.cluster_ctas() > 2 ? whole * 91 / 100 : whole, 1);
}

/// Relative slowdown of reading B if an epilogue separates the requests for two K blocks of 256
/// bytes that memory delivers together. A stage is requested when the stage that is `stages` before
/// it has been read. Measured on experts' products with two K blocks.
double split_pairs(const Candidate& c) {
  const auto& [work, t, plan, fast] = c;
  const std::int64_t k_blocks = work.k_blocks(t);
  const bool splits = work.promotes_sorted_rows() && k_blocks % 2 == 0 && t.stages % 2 == 1;
  return splits ? 1 + 0.2 / static_cast<double>(k_blocks) : 1;
}

/// Clocks of reading and writing everything once, with a separate B for each group. A memory-bound
/// kernel needs most of the device loading at once, and CTAs of other rows of a group load no other
/// B. With many rows of tiles there is more to compute than to read. With sorted groups, only the
/// last tiles wait for their B alone.
double memory_cycles(const Candidate& c, const DeviceFacts& facts, double busy) {
  const auto& [work, t, plan, fast] = c;
  const double rate = 0.95 * bytes_a_clock(facts);
  const double m = static_cast<double>(work.m), n = static_cast<double>(work.n);
  const double k = static_cast<double>(work.k), results = static_cast<double>(work.results);
  const double each_b = static_cast<double>(work.groups_with_rows());
  const bool sorted = c.work.sorted_rows();
  // Rows that are gathered come from L2, and a little later than the weights.
  const double rows_of_a = work.gathers_a ? m / static_cast<double>(work.choices) : m;
  const double later = sorted && work.gathers_a ? 1.02 : 1;
  const double bytes =
      (split_pairs(c) * each_b * n * k * work.b_operands() * work.k_pairs() +
       rows_of_a * k * work.k_pairs() * results + m * n * results * work.tensors_per_stage) *
      2;
  const bool waits = sorted && work.runs(t) > clusters_at_once(t, facts);
  const double last = waits ? 0.1 * t.bn * k * 2 * work.b_operands() / sm_rate : 0;
  const std::int64_t row_tiles =
      sorted ? ceil_div(work.row_tiles(t.bm), work.groups_with_rows()) : work.row_tiles(t.bm);
  const auto rows = std::min<std::int64_t>(row_tiles, 4);
  // Shares of the rate that the loads of CTAs reach, of whose operand `alike` others ask for the
  // same.
  const auto share = [&](std::int64_t alike) {
    return std::min(1.0, 2.5 * busy * (0.1 + 0.9 / static_cast<double>(alike)));
  };
  // With fewer columns of tiles than rows, fewer CTAs ask for the same A than for the same B.
  const std::int64_t columns = sorted ? rows : std::min(rows, ceil_div(work.n, t.bn));
  const double of_a = rows_of_a * k * work.k_pairs() * results * 2;
  return later * ((bytes - of_a) / share(rows) + of_a / share(columns)) / rate + last;
}

/// Clocks by which the last band of rows of tiles is longer than its share of `all`. Where B is
/// more than the L2 keeps, each band reads it from memory, and a few rows of tiles have fewer MMAs
/// than that takes. On an H100 nine rows took 370 us in bands of 8, and 343 in one of 16.
double last_band_cycles(const Candidate& c, const DeviceFacts& facts, double all) {
  const auto& [work, t, plan, fast] = c;
  if (work.sorted_rows() || work.grouped_reduction() || t.split_k > 1) return 0;
  const std::int64_t rows = work.row_tiles(std::int64_t{t.bm} * t.cluster_m);
  const std::int64_t last = rows % t.group_m;
  const double bytes = 2.0 * static_cast<double>(work.n * work.k) * work.b_operands();
  if (rows <= t.group_m || last == 0 || bytes < 0.5 * static_cast<double>(facts.l2_bytes)) return 0;
  const double share = all * static_cast<double>(last) / static_cast<double>(rows);
  return std::max(0.0, bytes / (0.95 * bytes_a_clock(facts)) - share);
}

/// For subtiles that are loaded and then overwritten: whether a tile's subtiles are prefetched
/// during the preceding tile (gradient_epilogue::runs_ahead).
bool runs_ahead(const Candidate& c) {
  const auto& [work, t, plan, fast] = c;
  if (work.grouped_rows()) return false;
  return t.epilogue_stages * (t.pingpong() ? t.mma_warpgroups : 1) >=
         (t.pingpong() ? plan.subtiles : 2);
}

/// The tables of sorted groups take registers, and most tiles with more accumulators a thread spill
/// some: a search drops those, and the default must not be one.
double spilling_factor(const Candidate& c) {
  const auto& [work, t, plan, fast] = c;
  const bool sorted =
      work.form.groups != grouping::none && work.form.source == group_source::routed;
  const int most_accumulators = t.mma_warpgroups == 3 ? 112 : t.swap_ab() ? 176 : 160;
  return sorted && plan.total_accumulators(work.form) > most_accumulators ? 1.1 : 1;
}

/// How much longer fp8 tiles of sorted groups' rows take, as measured on an H100 at 32 to 512 rows
/// a group. With swap-AB each thread has a factor of its own for each pair of columns: half as many
/// instructions again for what is promoted, and loads of the scales.
double promoted_rows_factor(const Candidate& c) {
  const auto& [work, t, plan, fast] = c;
  if (!t.swap_ab()) return t.cluster_ctas() > 1 ? 1.06 : 1;
  if (t.cluster_ctas() > 1) return 1.12;
  // Accumulators, those of a K block beside them, and the factors that they are promoted by.
  const int held = plan.total_accumulators(work.form) + plan.promotions * plan.accumulators +
                   plan.accumulators / 2;
  const bool crowded = held > 190;
  if (c.work.gathers_a) return (crowded ? 1.1 : 1) * (t.bm > 64 ? 1.08 : 1.02);
  return (crowded ? 1.05 : 1) * (t.bm > 64 ? 1.04 : 1);
}

/// Relative time of tiles of sorted groups' rows, as measured on an H200 at 256 to 8,192 rows a
/// group. CTAs in step read less from L2 and from memory, which takes power from the MMAs: those
/// with the same A, or, for groups with few tiles, all that read a group's B.
double sorted_rows_factor(const Candidate& c) {
  const auto& [work, t, plan, fast] = c;
  if (!c.work.sorted_rows()) return 1;
  if (c.work.promotes()) return promoted_rows_factor(c);
  // Reused rows come back from memory later than rows that are gathered again.
  const double reused = work.a_reuse == 1 ? 1 : work.a_reuse == 2 ? 1.4 : 1.6;
  const bool levels = sm90_levels_tiles(work.form, t);
  const bool cooperative = t.schedule == sm90_schedule::cooperative;
  const double gathered = cooperative ? 1.12 : levels && t.bm >= 128 ? 0.96 : 1.02;
  const double gather = work.gathers_a ? reused * gathered : 1;
  if (levels) {
    const double tiles = static_cast<double>(work.row_tiles(t.bm)) /
                         static_cast<double>(work.groups_with_rows());  // of a group
    const bool several = tiles > 3;
    const bool narrow = work.b_operands() * t.bn < 256;
    const double rows = t.bm >= 96 && t.bm < 128 ? 1 + 0.06 * (128 - t.bm) / 16 : 1;
    // A second warpgroup's MMAs fill the gaps of a lone one between its m64 tiles.
    const double in_turn = t.mma_warpgroups == 1 && plan.m64_tiles > 1 ? 1.01 : 1;
    const double of_narrow = several ? 1.07 : work.has_uneven_groups() ? 1.02 : 1;
    const double alone = gather * in_turn * rows * (narrow ? of_narrow : 1);
    if (work.gathers_a || t.cluster_ctas() == 1) return alone;
    if (t.cluster_n > 1) return alone * (!several ? 1 : work.b_operands() == 2 ? 0.985 : 0.995);
    return alone * (narrow ? 1.02 : tiles > 5 ? 1.01 : 0.97);
  }
  if (!cooperative) return work.gathers_a ? gather : t.bm > 64 ? 1.04 : 1;
  return gather * (t.cluster_m > 1 ? 1.03 : t.cluster_n > 1 ? 1.06 : 1.09);
}

/// Clocks by which a tile of 256 columns of fp8 takes longer where it has two K blocks at most: its
/// pipeline holds two tiles.
double short_k_cycles(const Candidate& c) {
  const bool is_short = c.work.promotes_sorted_rows() && c.work.k_blocks(c.t) <= 2;
  return is_short && c.t.bn > 128 ? 2500 : 0;
}

double cycles_of_groups(const Candidate& c, const DeviceFacts& facts) {
  constexpr double start_cycles = 4000;
  constexpr double cluster_cycles = 1300;  // of CTAs that wait for each other
  constexpr double split_cycles = 300;
  constexpr double output_rate = 20;        // bytes a clock, through shared memory,
  constexpr double level_output_rate = 50;  // of swap-AB's tiles of sorted rows
  constexpr double exposed = 0.4;           // of the epilogue in ping-pong
  constexpr double waiting = 1.5;           // times longer, for subtiles that are read
  const auto& [work, t, plan, fast] = c;
  const bool waits = work.tensors_per_stage > 1 && !runs_ahead(c);
  const double ctas = static_cast<double>(work.runs(t) * t.cluster_ctas());
  const double busy = std::min(1.0, ctas / std::max(facts.multiprocessors, 1));
  const bool sorted = c.work.sorted_rows();
  const double rate = sorted && t.swap_ab() ? level_output_rate : output_rate;
  // The subtiles of a large tile wait for each other.
  const double large =
      sorted && !t.pingpong() ? std::max(0.0, 1000 * (t.bm * t.bn / (144.0 * 128) - 1)) : 0;
  // With one buffer a subtile waits until the one before it is read. On an H100 cooperative tiles
  // in fp8 then take 2 to 7% longer for a gated product, and 3% for a plain one with scales of
  // rows. With block scales they do not.
  const bool scaled_whole = work.b_operands() == 2 ? work.form.scales == scaling::tensor
                                                   : work.form.scales == scaling::channel;
  const bool one_buffer =
      t.epilogue_stages == 1 && t.schedule == sm90_schedule::cooperative && !sorted && scaled_whole;
  const double waits_for_buffer = !one_buffer ? 1 : work.b_operands() == 2 ? 1.05 : 1.15;
  const double output = double(t.bm) * t.bn * 2 * work.tensors_per_stage / rate *
                            (waits ? waiting : 1) * waits_for_buffer +
                        large;
  const double steps = 4.0 * static_cast<double>(work.k_blocks(t));
  const double loaded = step_cycles(c, facts, busy);
  const double first = std::max(steps * gathering_step_cycles(c, loaded), reuse_cycles(c, facts));
  const double mean = (first + (work.a_reuse - 1) * steps * loaded) / work.a_reuse;
  // A cluster's CTAs start together, and those that lie beyond the matrix idle. Sorted groups'
  // tiles differ, so that the last of one wave run beside the first of the next.
  const double runs =
      static_cast<double>(work.runs(t)) / static_cast<double>(clusters_at_once(t, facts));
  const double whole = std::ceil(runs);
  const double waves = (sorted ? std::max(0.75 * whole + 0.25 * runs, 1.0) : whole) * work.a_reuse;
  // In ping-pong the other warpgroup's MMAs run beside the epilogue of all tiles but the last.
  // Heads are normalised and rotated there, for which one warpgroup alone takes longer.
  const bool hides = t.pingpong() && !work.form.is_qkv();
  const double hidden = hides ? (1 - exposed) * (1 - 0.8 / std::max(whole, 1.0)) : 0;
  const double tile = mean + (1 - hidden) * output + placing_cycles(c) + short_k_cycles(c);
  const double together = t.split_k > 1          ? split_cycles + reduction_cycles(c)
                          : t.cluster_ctas() > 1 ? cluster_cycles
                                                 : 0;
  // Behind another launch the weights of a few tokens are asked for ahead, by the SMs that have a
  // CTA. A layer of 4096 features with 16 sequences takes 202.6 us on an H100, 207.5 with `down` on
  // half of the SMs, and 207.0 with gate and up on 112 of 132.
  const double asked_ahead = t.swap_ab() && work.m <= 16 && !work.grouped_rows() ? 0.05 : 0;
  // With one or two tiles of rows, swap-AB is 0 to 5% ahead of the same tile without.
  const bool few_rows =
      !t.swap_ab() && work.m <= 128 && !work.form.is_qkv() && work.form.groups == grouping::none;
  const double tiles = waves * tile * spilling_factor(c) * sorted_rows_factor(c);
  return (few_rows ? 1.003 : 1) * (1 + asked_ahead * (1 - busy)) *
         (start_cycles + together + overlapped<3>(c, tiles, memory_cycles(c, facts, busy)) +
          last_band_cycles(c, facts, tiles));
}

/// `work` is left as it was.
double kernel_cycles(Workload& work, const DeviceFacts& facts, const Tile& tile,
                     const sm90_plan& plan, bool fast) {
  const Candidate candidate{work, tile, plan, fast};
  const double expected = cycles_of_groups(candidate, facts);
  // Tiles of fp8 take so long that one wave more decides between heights, also of even groups.
  const bool counts = work.has_uneven_groups() || work.promotes_sorted_rows();
  if (work.deviation <= 0 && !counts) return expected;
  // One row more than the tiles of a wave hold costs another wave. So what is expected of the cost
  // counts, which the cost of the expected number is not: half of all draws are about as expected,
  // and a quarter on each side are usual_deviations away.
  double cost = expected / 2;
  const std::int64_t first_group_rows = work.first_group_rows;
  for (const double side : {-usual_deviations, usual_deviations}) {
    work.more_tiles = side;
    work.first_group_rows = work.drawn_first_rows(side);
    cost += cycles_of_groups(candidate, facts) / 4;
    work.first_group_rows = first_group_rows;
  }
  work.more_tiles = 0;
  return cost;
}

/// Cost of the kernel that sorts the rows, or the tokens of the operands that are not sorted,
/// besides its launch.
double permute_cycles(const GemmProblem& gemm, const DeviceFacts& facts) {
  constexpr double start_cycles = 4000;
  // Times longer, of rows: with what it takes the product to read from memory what it would gather
  // from L2.
  constexpr double reading = 1.75;
  // A token's row is read from memory once, and written for each of its groups.
  const double copies = 1 + 1 / static_cast<double>(gemm.groups.choices);
  if (gemm.groups.by == Grouping::rows)
    return start_cycles + reading * 2 * copies * static_cast<double>(gemm.m) *
                              static_cast<double>(gemm.k) / (0.9 * bytes_a_clock(facts));
  const double columns = double((gemm.a_sorted ? 0 : gemm.m) + (gemm.b_sorted ? 0 : gemm.n));
  const double bytes = 2 * 2 * columns * static_cast<double>(gemm.k);
  return start_cycles + bytes / (0.9 * bytes_a_clock(facts));
}

}  // namespace

CostModel::CostModel(const GemmProblem& gemm, const DeviceFacts& facts)
    : gemm_(gemm), facts_(facts), whole_(gemm), work_(whole_) {}

double CostModel::cycles(const Tile& tile, const sm90_plan& plan) {
  return cycles(tile, plan, false);
}

double CostModel::least_cycles(const Tile& tile, const sm90_plan& plan) {
  constexpr double rounding = 1 - 1e-9;  // far beyond that of some ten operations
  return rounding * cycles(tile, plan, true);
}

double CostModel::cycles(const Tile& tile, const sm90_plan& plan, bool fast) {
  work_.take(whole_, tile);
  const double permuting = tile.pre_permute ? permute_cycles(gemm_, facts_) : 0;
  if (work_.grouped_reduction()) {
    // CTAs that share k, and an SM with tiles of several groups, add up all tokens; one with a
    // single tile those of one group, and the group with the most tokens decides.
    double share = 1.0 / static_cast<double>(work_.groups);
    if (tile.split_k > 1)
      share = 1;
    else if (work_.form.source == group_source::mask && work_.tiles(tile) <= facts_.multiprocessors)
      share = std::max(gemm_.groups.expected_share, 1 - gemm_.groups.expected_share);
    work_.k = std::max<std::int64_t>(1, std::llround(static_cast<double>(whole_.k) * share));
  }
  return kernel_cycles(work_, facts_, tile, plan, fast) + permuting;
}

double cycles(const GemmProblem& gemm, const DeviceFacts& facts, const Config& config) {
  CostModel model(gemm, facts);
  const Tile tile(config);
  return model.cycles(tile, sm90_plan_of(form_of(gemm), tile));
}

}  // namespace fftune::sm90
