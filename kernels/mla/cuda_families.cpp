// The CUDA families of mla: wgmma, and mma.sync, over a cache that is read once, and the fallback.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/common/least_cost.hpp"
#include "kernels/common/parameter_fields.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/common/typed_space.hpp"
#include "kernels/gemm/element.hpp"
#include "kernels/mla/decode_config.cuh"
#include "kernels/mla/mla.hpp"
#include "kernels/mla/sm90_config.cuh"

namespace fftune::mla {
namespace {

constexpr const char* decode_file = "mla/decode.cu";
constexpr const char* sm90_file = "mla/sm90.cu";
constexpr const char* simt_file = "mla/simt.cu";
constexpr std::string_view decode_name = "mla_decode", sm90_name = "mla_sm90";
constexpr std::int64_t most_rank_of_registers = 512;  // of results in registers

mla_form form_of(const Layer& layer) {
  mla_form form;
  form.type = element_of(layer.dtype);
  form.rank = static_cast<int>(layer.rank);
  form.rope = static_cast<int>(layer.rope);
  form.paged = layer.page > 0;
  form.lengths = layer.lengths;
  form.lse = layer.lse;
  form.chosen = layer.top > 0;
  return form;
}

std::string template_argument(const mla_form& form) {
  return StructText("mla_form", "type", element_text(form.type), "rank", form.rank, "rope",
                    form.rope)
      .flags("paged", form.paged, "lengths", form.lengths, "lse", form.lse, "chosen", form.chosen);
}

ParameterStruct parameters_of(const Problem& problem) {
  using Params = mla_params;
  const TensorPlaces places(mla_op().tensors(problem));
  const Layer layer = layer_of(problem), divided = divided_layer_of(problem);
  ParameterStruct parameters{.bytes = sizeof(Params), .fields = {}};
  ParameterFields<Params> fields(parameters);
  fields.set_tensors(places, &Params::q_latent, "q_latent", &Params::q_rope, "q_rope",
                     &Params::cache, "cache", &Params::pages, "pages", &Params::lengths, "lengths",
                     &Params::out, "out", &Params::lse, "lse");
  fields.set(&Params::row, layer.row, &Params::block, layer.block, &Params::batch, divided.b,
             &Params::queries, divided.s, &Params::heads, layer.heads, &Params::kv_len, layer.kv,
             &Params::page, layer.page, &Params::page_count, layer.pages, &Params::scale,
             layer.scale);
  return parameters;
}

/// The parameters of the kernels for lists, whose first member those of the others are.
ParameterStruct list_parameters_of(const Problem& problem, const ParameterStruct& of_mla) {
  using Params = mla_list_params;
  const Layer layer = layer_of(problem);
  ParameterStruct parameters{.bytes = sizeof(Params), .fields = {}};
  ParameterFields<Params> fields(parameters);
  fields.set_struct(&Params::mla, of_mla);
  fields.set_tensors(TensorPlaces(mla_op().tensors(problem)), &Params::chosen, "chosen");
  fields.set(&Params::top, layer.top, &Params::queries, layer.s);
  return parameters;
}

KernelLaunch& append(Program& program, const DeviceFacts& facts, const char* file,
                     const std::string& expression, Dim3 grid, int threads,
                     const ParameterStruct& parameters) {
  auto& launch = append_pdl_kernel(program, facts, file, expression, grid,
                                   static_cast<std::uint32_t>(threads), {});
  launch.parameters = parameters;
  return launch;
}

// --- The fallback ---

Program simt_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const Layer layer = divided_layer_of(problem);
  Program program;
  const std::int64_t blocks = std::min<std::int64_t>(layer.b * layer.rows(), 1 << 20);
  const ParameterStruct parameters = parameters_of(problem);
  const bool lists = layer.top > 0;
  append(program, facts, simt_file,
         fmt::format("mla_simt{}<{}>", lists ? "_lists" : "", template_argument(form_of(layer))),
         {static_cast<std::uint32_t>(blocks), 1, 1}, 128,
         lists ? list_parameters_of(problem, parameters) : parameters);
  return program;
}

// --- mma.sync ---

using Point = mla_decode_config;
using Points = TypedSpace<Point>;

Point config_of(const Config& config) {
  return {.row_warps = config.get("row_warps"),
          .column_warps = config.get("column_warps"),
          .m_tiles = config.get("m_tiles"),
          .keys = config.get("keys"),
          .stages = config.get("stages"),
          .ctas_per_sm = config.get("ctas_per_sm"),
          .least_tiles = config.get("least_tiles")};
}

std::string template_argument(const Point& config) {
  return StructText("mla_decode_config", "row_warps", config.row_warps, "column_warps",
                    config.column_warps, "m_tiles", config.m_tiles, "keys", config.keys, "stages",
                    config.stages, "ctas_per_sm", config.ctas_per_sm);
}

std::string template_argument(const mla_sm90_config& config) {
  return StructText("mla_sm90_config", "keys", config.keys, "stages", config.stages, "tma",
                    config.tma, "cluster", config.cluster);
}

template <class Config>
mla_grid grid_of(const Layer& layer, const DeviceFacts& facts, const Config& config) {
  return mla_grid_of(config, facts.multiprocessors, static_cast<int>(layer.b), layer.rows(),
                     static_cast<int>(layer.kv), !layer.lengths || layer.top > 0);
}

/// Registers of a thread: its accumulators, the scores of its rows, and what addresses and
/// fragments take.
std::int64_t registers_of(const mla_form& form, const Point& config) {
  return 76 + config.accumulators(form) + config.m_tiles * config.keys / 2;
}

bool fits_shared_memory(const DeviceFacts& facts, const mla_form& form, const Point& config) {
  constexpr std::int64_t reserved = 1024;  // of each CTA, by the driver
  const std::int64_t bytes = mla_decode_plan_of(form, config).shared_bytes;
  return bytes <= facts.shared_bytes_per_block &&
         config.ctas_per_sm * (bytes + reserved) <= facts.shared_bytes_per_multiprocessor;
}

Points points_of(const Layer& layer, const DeviceFacts& facts) {
  const mla_form form = form_of(layer);
  Points space{Point()};
  space
      .parameter("row_warps", "warps along the rows, queries times heads, of a CTA",
                 Points::to<&Point::row_warps>, {1, 2, 4})
      .parameter("column_warps", "warps along the latent features of the result",
                 Points::to<&Point::column_warps>, {1, 2, 4, 8})
      .parameter("m_tiles", "tiles of 16 rows of a warp", Points::to<&Point::m_tiles>, {1, 2})
      .parameter("keys", "keys of a stage", Points::to<&Point::keys>, {16, 32, 64})
      .parameter("stages", "stages of keys in shared memory", Points::to<&Point::stages>,
                 {2, 3, 4, 5, 6})
      .parameter("ctas_per_sm", "CTAs that share an SM", Points::to<&Point::ctas_per_sm>, {1, 2, 3})
      .parameter("least_tiles", "stages of keys of a CTA at least, before another shares them",
                 Points::to<&Point::least_tiles>, {1, 2, 4, 8});
  const Points::Names all{"row_warps", "column_warps", "m_tiles", "keys", "stages", "ctas_per_sm"};
  space.constraint("each warp has whole blocks of 8 keys, and accumulators in registers",
                   {"row_warps", "column_warps", "m_tiles", "keys", "stages"},
                   [form](const Point& c) { return mla_decode_misfit(form, c) == nullptr; });
  space.constraint("a CTA has 2 to 8 warps", {"row_warps", "column_warps"},
                   [](const Point& c) { return c.warps() >= 2 && c.warps() <= 8; });
  space.constraint(
      "more than half of the rows would be padding", {"row_warps", "m_tiles"},
      [rows = layer.rows()](const Point& c) { return c.rows() == 16 || c.rows() < 2 * rows; });
  space.constraint("an SM has 65,536 registers, and a thread at most 255 of them",
                   {"row_warps", "column_warps", "m_tiles", "keys", "ctas_per_sm"},
                   [form](const Point& c) {
                     const std::int64_t needed = registers_of(form, c);
                     return needed <= 255 && c.ctas_per_sm * c.threads() * needed <= 65536;
                   });
  space.constraint("the stages of an SM's CTAs must fit in its shared memory", all,
                   [form, facts](const Point& c) { return fits_shared_memory(facts, form, c); });
  return space;
}

/// Bytes of the cache that a launch reads. Blocks of rows beside each other find the keys in L2.
double read_bytes(const Layer& layer, const mla_grid& grid) {
  const double reads = 1 + 0.3 * (grid.row_blocks - 1);
  return 2.0 * static_cast<double>(layer.b * layer.kv * layer.width()) * reads;
}

/// Seconds in which groups add up the parts of sequences that they share: `threads` threads of a
/// CTA, which has `rows` rows at most, with 8 loads of each in flight. A CTA loads as many elements
/// as it has stored.
double exchange_seconds(const Layer& layer, const mla_grid& grid, std::int64_t rows, int threads) {
  if (!grid.cuts) return 0;
  const double loads =
      static_cast<double>(std::min(layer.rows(), rows)) * static_cast<double>(layer.rank) / 4;
  return 3e-6 + 0.7e-6 * std::ceil(loads / (8.0 * threads));
}

/// Seconds of a launch: the larger of the time of the memory and that of the tensor cores, and the
/// exchange of parts.
double seconds(const Layer& layer, const DeviceFacts& facts, const Point& config) {
  const mla_form form = form_of(layer);
  const mla_grid grid = grid_of(layer, facts, config);
  const double sms = facts.multiprocessors, clock = facts.clock_hz;
  const double ctas = static_cast<double>(grid.row_blocks) * grid.groups;
  const double resident = std::clamp(ctas / sms, 1.0, static_cast<double>(config.ctas_per_sm));
  const double waves = std::ceil(ctas / (sms * config.ctas_per_sm));
  const double tiles = std::ceil(static_cast<double>(layer.kv) / config.keys) *
                       static_cast<double>(layer.b) / grid.groups;
  const double bytes = read_bytes(layer, grid);
  // Memory delivers at full speed with some 64 KiB of each SM in flight, and an SM takes 50 bytes a
  // clock at most.
  const double in_flight = resident * (config.stages - 1) * config.keys * layer.width() * 2.0;
  const double speed = std::min(
      0.9 * facts.memory_bandwidth * std::pow(std::min(1.0, in_flight / (64 * 1024)), 0.17),
      50 * clock * std::min(sms, ctas));
  const double stream = bytes / speed * std::ceil(tiles) / tiles;
  // A scheduler of an SM has some 8 cycles for an MMA of its warps, and 5 for the scores of a row
  // and a key; a tile has two barriers, and fragments to wait for. On an H200 16 rows take 0.87 to
  // 0.95 times as long with four warps along the columns as with eight.
  const double mmas = config.m_tiles * (config.keys_of_warp() / 8.0 * form.width() / 16.0 +
                                        config.keys / 16.0 * config.columns(form) / 8.0);
  const double of_warp = 8 * mmas + 5.0 * config.keys * config.m_tiles;
  const double of_scheduler = std::ceil(resident * config.warps() / 4) * of_warp;
  // Queries, and the result: on an H200 45 sequences of 175 keys take 30 us with 64 rows of a CTA.
  const double parts = std::ceil(static_cast<double>(layer.b) / grid.groups);
  const double of_part = static_cast<double>(config.rows() * layer.width() * 2) / 6;
  const double compute =
      waves * (std::ceil(tiles) * (of_scheduler + 400) + parts * of_part) / clock;
  return std::max(stream, compute) + 0.2 * std::min(stream, compute) +
         exchange_seconds(layer, grid, config.rows(), config.threads()) + 3e-6;
}

/// Why a kernel of the tensor cores that keeps a result in registers cannot serve a layer.
std::optional<std::string> refuse_rows(const Layer& layer, const char* instruction) {
  if (layer.dtype == DType::f32)
    return fmt::format("{} multiplies bf16 and fp16, not f32", instruction);
  if (layer.rank > most_rank_of_registers)
    return fmt::format("rank={} exceeds {}: the result must fit in registers", layer.rank,
                       most_rank_of_registers);
  for (const auto& [name, value] : {std::pair{"rank", layer.rank},
                                    {"rope", layer.rope},
                                    {"kv-row", layer.row},
                                    {"kv-block", layer.block}})
    if (value % 8 != 0)
      return fmt::format("{}={} is no multiple of 8: rows are loaded in 16 bytes", name, value);
  return std::nullopt;
}

Space decode_space(const Problem& problem, const DeviceFacts& facts) {
  return points_of(divided_layer_of(problem), facts).space();
}

Config decode_default(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = divided_layer_of(problem);
  return least_cost(points_of(layer, facts), decode_name,
                    [&](const Point& config) { return seconds(layer, facts, config); });
}

/// The launch of a kernel whose CTAs have `threads` threads, and the workspace of sequences that
/// are cut. complete() changes a launch that has mla's parameters.
template <class Config, class Complete>
Program divided_program(const Problem& problem, const DeviceFacts& facts, const Config& config,
                        const char* file, std::string_view kernel, int threads, int shared_bytes,
                        const Complete& complete) {
  const Layer layer = divided_layer_of(problem);
  const mla_form form = form_of(layer);
  const mla_grid grid = grid_of(layer, facts, config);
  ParameterStruct parameters = parameters_of(problem);
  Program program;
  if (grid.cuts) {
    program.scratch = {{static_cast<std::size_t>(grid.partial_bytes(form, config.rows())), false},
                       {static_cast<std::size_t>(grid.counter_bytes()), true, true}};
    ParameterFields<mla_params>(parameters)
        .set(&mla_params::partials, ScratchArgument{0}, &mla_params::counters, ScratchArgument{1});
  }
  KernelLaunch& launch = append(
      program, facts, file,
      fmt::format("{}<{}, {}>", kernel, template_argument(form), template_argument(config)),
      {static_cast<std::uint32_t>(grid.row_blocks), static_cast<std::uint32_t>(grid.groups), 1},
      threads, parameters);
  complete(launch);
  launch.shared_bytes = static_cast<std::uint32_t>(shared_bytes);
  launch.cooperative = grid.cuts;
  if (grid.cuts) launch.programmatic = false;
  return program;
}

Program decode_program(const Problem& problem, const DeviceFacts& facts, const Config& values) {
  const Point config = config_of(values);
  const bool lists = layer_of(problem).top > 0;
  return divided_program(problem, facts, config, decode_file,
                         lists ? "mla_decode_lists" : decode_name, config.threads(),
                         mla_decode_plan_of(form_of(layer_of(problem)), config).shared_bytes,
                         [&](KernelLaunch& launch) {
                           if (lists)
                             launch.parameters = list_parameters_of(problem, *launch.parameters);
                         });
}

// --- wgmma ---

using Sm90Points = TypedSpace<mla_sm90_config>;

mla_sm90_config sm90_config_of(const Config& config) {
  return {.keys = config.get("keys"),
          .stages = config.get("stages"),
          .tma = config.get("tma"),
          .cluster = config.get("cluster"),
          .least_tiles = config.get("least_tiles")};
}

Sm90Points sm90_points_of(const Layer& layer, const DeviceFacts& facts) {
  Sm90Points space{mla_sm90_config()};
  space.parameter("keys", "keys of a stage", Sm90Points::to<&mla_sm90_config::keys>, {32, 64})
      .parameter("stages", "stages of keys in shared memory",
                 Sm90Points::to<&mla_sm90_config::stages>, {2, 3, 4, 5, 6})
      .parameter("tma", "whether TMA loads whole tiles of keys",
                 Sm90Points::to<&mla_sm90_config::tma>, {0, 1})
      .parameter("cluster", "CTAs of neighbouring row blocks, each of which loads a part for all",
                 Sm90Points::to<&mla_sm90_config::cluster>, {1, 2})
      .parameter("least_tiles", "stages of keys of a CTA at least, before another shares them",
                 Sm90Points::to<&mla_sm90_config::least_tiles>, {1, 2, 4, 8});
  space.constraint("TMA loads tiles of one page, of rows without gaps", {"keys", "tma"},
                   [layer](const mla_sm90_config& c) {
                     const std::int64_t rows = layer.page > 0 ? layer.page : layer.kv;
                     return c.tma == 0 ||
                            (layer.row == layer.width() && layer.block == rows * layer.row &&
                             (layer.page == 0 || layer.page % c.keys == 0));
                   });
  space.constraint("TMA loads for the CTAs of a cluster, which divide the row blocks",
                   {"tma", "cluster"}, [layer](const mla_sm90_config& c) {
                     const std::int64_t row_blocks = quotient_up(layer.rows(), c.rows());
                     return c.cluster == 1 || (c.tma != 0 && row_blocks % c.cluster == 0);
                   });
  space.constraint("queries and the stages of keys must fit in shared memory", {"keys", "stages"},
                   [form = form_of(layer), facts](const mla_sm90_config& c) {
                     return mla_sm90_plan_of(form, c).shared_bytes <= facts.shared_bytes_per_block;
                   });
  return space;
}

/// Seconds of a launch: the larger of the time of the memory and that of the tensor cores, and the
/// exchange of parts.
double sm90_seconds(const Layer& layer, const DeviceFacts& facts, const mla_sm90_config& config) {
  const mla_grid grid = grid_of(layer, facts, config);
  const double sms = facts.multiprocessors, clock = facts.clock_hz;
  const double ctas = static_cast<double>(grid.row_blocks) * grid.groups;
  const double tiles = std::ceil(std::ceil(static_cast<double>(layer.kv) / config.keys) *
                                 static_cast<double>(layer.b) / grid.groups);
  const double bytes = read_bytes(layer, grid);
  // Two stages keep less in flight than the kernel of mma.sync does.
  const double stream = bytes / std::min(0.8 * facts.memory_bandwidth, 50 * clock * ctas);
  // An SM has 4,096 FLOPs a cycle. Shared memory delivers 128 bytes a cycle: scores of 32 keys read
  // 1.5 times as long as they multiply. The first tile of a part overlaps with nothing.
  const double per_feature = 2.0 * 64 * config.keys / 4096;
  const double products = per_feature * ((config.keys < 64 ? 1.5 : 1) * layer.width() + layer.rank);
  const double parts = std::ceil(static_cast<double>(layer.b) / grid.groups);
  // On an H200 a tile of 64 keys takes 2.4 us where cp.async loads it.
  const double of_tile = std::max(1.15 * products + 150, config.tma == 0 ? 66.0 * config.keys : 0);
  const double compute = std::ceil(ctas / sms) * (tiles * of_tile + 3000 * parts) / clock;
  return std::max(stream, compute) + 0.1 * std::min(stream, compute) +
         exchange_seconds(layer, grid, config.rows(), 256) + 9e-6;
}

std::optional<std::string> sm90_refusal(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = divided_layer_of(problem);
  if (facts.compute_capability != 90)
    return fmt::format("wgmma is an instruction of compute capability 9.0 alone: {} has {}.{}",
                       facts.name, facts.compute_capability / 10, facts.compute_capability % 10);
  if (auto reason = refuse_rows(layer, "wgmma")) return reason;
  if (layer.top > 0)
    return fmt::format("top={}: lists of keys are read by the kernel of mma.sync", layer.top);
  if (layer.rank % 128 != 0)
    return fmt::format("rank={} is no multiple of 128: two MMA warpgroups have half of it each",
                       layer.rank);
  if (layer.rope % 16 != 0)
    return fmt::format("rope={} is no multiple of 16, the depth of a wgmma", layer.rope);
  if (sm90_points_of(layer, facts).is_empty())
    return fmt::format("tiles of rank={} and rope={} do not fit in the shared memory of {}",
                       layer.rank, layer.rope, facts.name);
  return std::nullopt;
}

std::optional<std::string> decode_refusal(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = divided_layer_of(problem);
  if (auto reason = refuse_rows(layer, "mma.sync m16n8k16")) return reason;
  // The kernel counts tiles in 32 bits.
  if (layer.top > 0 && layer.b * quotient_up(layer.top, 16) > std::int64_t{1} << 30)
    return fmt::format("{} lists of {} keys are more than 2^30 tiles", layer.b, layer.top);
  if (points_of(layer, facts).is_empty())
    return fmt::format("tiles of rank={} do not fit in the registers and shared memory of {}",
                       layer.rank, facts.name);
  return std::nullopt;
}

Space sm90_space(const Problem& problem, const DeviceFacts& facts) {
  return sm90_points_of(divided_layer_of(problem), facts).space();
}

Config sm90_default(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = divided_layer_of(problem);
  return least_cost(sm90_points_of(layer, facts), sm90_name, [&](const mla_sm90_config& config) {
    return sm90_seconds(layer, facts, config);
  });
}

/// The cache as TMA loads it: boxes of 64 elements of the rows of a tile.
TensorMapArgument cache_map(const Problem& problem, const Layer& layer,
                            const mla_sm90_config& config) {
  TensorMapArgument map;
  map.matrix = tensor_of(TensorPlaces(mla_op().tensors(problem)), "cache");
  map.dtype = layer.dtype;
  map.rows = layer.page > 0 ? layer.page : layer.kv;
  map.columns = layer.width();
  map.box_rows = static_cast<std::uint32_t>(config.box_rows());
  map.box_columns = 64;
  map.matrices = layer.blocks();
  return map;
}

Program sm90_program(const Problem& problem, const DeviceFacts& facts, const Config& values) {
  const mla_sm90_config config = sm90_config_of(values);
  const Layer layer = divided_layer_of(problem);
  return divided_program(
      problem, facts, config, sm90_file, sm90_name, 384,
      mla_sm90_plan_of(form_of(layer), config).shared_bytes, [&](KernelLaunch& launch) {
        const ParameterStruct of_mla = *launch.parameters;
        launch.parameters = ParameterStruct{.bytes = sizeof(mla_sm90_params), .fields = {}};
        ParameterFields<mla_sm90_params> fields(*launch.parameters);
        fields.set_struct(&mla_sm90_params::mla, of_mla);
        if (config.tma != 0) fields.set(&mla_sm90_params::cache, cache_map(problem, layer, config));
        launch.cluster.x = static_cast<std::uint32_t>(config.cluster);
      });
}

/// Whether wgmma serves a problem that mma.sync serves too, and is faster by the cost models.
bool prefers_sm90(const Problem& problem, const DeviceFacts& facts) {
  if (sm90_refusal(problem, facts)) return false;
  const Layer layer = divided_layer_of(problem);
  return sm90_seconds(layer, facts, sm90_config_of(sm90_default(problem, facts))) <
         seconds(layer, facts, config_of(decode_default(problem, facts)));
}

/// A family with a cost model.
class MlaFamily final : public StageFamily {
 public:
  MlaFamily(StageFamilyFacts facts,
            double (*seconds)(const Problem&, const DeviceFacts&, const Config&))
      : StageFamily(std::move(facts)), seconds_(seconds) {}

  bool is_preferred(const Problem& problem, const DeviceFacts& facts) const override {
    return name() != decode_name || !prefers_sm90(problem, facts);
  }

  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config& config) const override {
    if (facts.memory_bandwidth <= 0 || facts.clock_hz <= 0 || facts.multiprocessors == 0)
      return std::nullopt;
    return seconds_(problem, facts, config);
  }

 private:
  double (*seconds_)(const Problem&, const DeviceFacts&, const Config&);
};

}  // namespace

std::vector<const Family*> cuda_families() {
  static const std::vector<MlaFamily> families = [] {
    std::vector<MlaFamily> made;
    made.emplace_back(
        StageFamilyFacts{.name = decode_name,
                         .summary = "mma.sync, the keys of all sequences divided among the SMs",
                         .sources = {decode_file},
                         .refusal = decode_refusal,
                         .search = {decode_space, decode_default},
                         .program = decode_program},
        [](const Problem& problem, const DeviceFacts& facts, const Config& config) {
          return seconds(divided_layer_of(problem), facts, config_of(config));
        });
    made.emplace_back(
        StageFamilyFacts{.name = sm90_name,
                         .summary = "wgmma: 64 rows, of which two MMA warpgroups have half each",
                         .sources = {sm90_file},
                         .refusal = sm90_refusal,
                         .search = {sm90_space, sm90_default},
                         .program = sm90_program},
        [](const Problem& problem, const DeviceFacts& facts, const Config& config) {
          return sm90_seconds(divided_layer_of(problem), facts, sm90_config_of(config));
        });
    made.emplace_back(
        StageFamilyFacts{.name = "mla_simt",
                         .summary = "a warp for each key, a lane for every 32nd feature",
                         .sources = {simt_file},
                         .is_fallback = true,
                         .program = simt_program},
        [](const Problem& problem, const DeviceFacts& facts, const Config&) {
          // A lane has some 4 FLOPs a clock between loads of one element.
          const double flops = mla_op().stages(problem).front().flops;
          return 3e-6 + flops / (128.0 * facts.multiprocessors * facts.clock_hz);
        });
    return made;
  }();
  return addresses_of(families);
}

}  // namespace fftune::mla
