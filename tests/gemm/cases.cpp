#include "gemm/cases.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include "core/error.hpp"

namespace fftune::test {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// A name that lasts as long as the program: problems keep views.
std::string_view lasting(const std::string& name) {
  static std::set<std::string> names;
  return *names.insert(name).first;
}

TensorNames of_each_group(const char* name, std::int64_t count, bool stacked) {
  if (stacked || count == 1) return {lasting(name)};
  TensorNames names;
  for (std::int64_t group = 0; group < count; ++group)
    names.push_back(lasting(fmt::format("{}_group{}", name, group)));
  return names;
}

struct Size {
  std::int64_t m, n, k;
};

/// The size with what is contiguous in memory rounded up to a multiple of `aligned`.
Size round_up(Size size, Major a_major, Major b_major, std::int64_t aligned) {
  const auto rounded = [=](std::int64_t extent) { return ceil_div(extent, aligned) * aligned; };
  size.n = rounded(size.n);
  if (a_major == Major::mn) size.m = rounded(size.m);
  if (a_major == Major::k || b_major == Major::k) size.k = rounded(size.k);
  return size;
}

GemmProblem gemm_of(DType dtype, Size size, GemmForm form, Major a_major, Major b_major) {
  GemmProblem gemm{.m = size.m,
                   .n = size.n,
                   .k = size.k,
                   .dtype = dtype,
                   .c_dtype = dtype,
                   .wide_dtype = dtype,
                   .form = form,
                   .a_major = a_major,
                   .b_major = b_major};
  gemm.a = {{"a0"}};
  gemm.b = {{"b0"}};
  gemm.c = {{"c0"}};
  if (form == GemmForm::k_concatenated || form == GemmForm::two_outputs) gemm.a.push_back({"a1"});
  if (form == GemmForm::k_concatenated || form == GemmForm::dual_b) gemm.b.push_back({"b1"});
  if (form == GemmForm::two_outputs) gemm.c.push_back({"c1"});
  return gemm;
}

void make_gated(GemmProblem& gemm, Activation activation, bool stores) {
  gemm.epilogue = {.kind = EpilogueKind::gated, .activation = activation};
  if (!stores) return;
  gemm.epilogue.gate = "gate";
  gemm.epilogue.up = "up";
}

void make_gradient(GemmProblem& gemm, Activation activation, bool stores_hidden) {
  gemm.epilogue = {.kind = EpilogueKind::activation_gradient,
                   .activation = activation,
                   .gate = "gate",
                   .up = "up",
                   .d_up = "d_up"};
  if (stores_hidden) gemm.epilogue.hidden = "hidden";
}

void add_sources(GemmProblem& gemm, bool in_place) {
  for (std::size_t i = 0; i < gemm.c.size(); ++i) {
    TensorNames names = gemm.c[i];
    if (!in_place)
      for (auto& name : names) name = lasting("before_" + std::string(name));
    gemm.epilogue.source.push_back(names);
  }
}

std::string name_of(const GemmProblem& gemm, std::string_view what) {
  static constexpr const char* forms[] = {"single", "dual_b", "k_concatenated", "two_outputs"};
  const auto major = [](Major of) { return of == Major::k ? "k" : "mn"; };
  return fmt::format("{} {} {}x{}x{} {} A {}-major{} B {}-major{}{}", what,
                     forms[static_cast<int>(gemm.form)], gemm.m, gemm.n, gemm.k,
                     dtype_name(gemm.dtype), major(gemm.a_major), gemm.a_sorted ? " sorted" : "",
                     major(gemm.b_major), gemm.b_sorted ? " sorted" : "",
                     gemm.c_sorted ? " C sorted" : "");
}

/// The groups of a case: how they are given, and which tokens they have.
struct Grouped {
  const char* name;
  bool by_mask;
  bool stacked;
  std::vector<std::int64_t> sizes;
  std::int64_t before = 0;
};

/// Groupings of `tokens` tokens.
std::vector<Grouped> groupings(std::int64_t tokens) {
  const auto some = [&](double share) {
    return static_cast<std::int64_t>(share * static_cast<double>(tokens));
  };
  std::vector<std::int64_t> seven(7, tokens / 7), many(64, 0), most(300, 0);
  seven[2] = 0;
  for (std::int64_t token = 0; token < tokens; ++token)
    ++many[static_cast<std::size_t>(token * token % 61)];
  for (std::int64_t token = 0; token < tokens; ++token)
    ++most[static_cast<std::size_t>(token * token % 293 + 7)];
  return {{"mask", true, false, {some(0.3), tokens - some(0.3)}},
          {"mask all true", true, false, {tokens, 0}},
          {"mask all false", true, true, {0, tokens}},
          {"one routed group", false, true, {tokens}},
          {"three routed groups, one overfull", false, true, {1, some(0.9), 0}, 1},
          {"seven routed groups, one empty, tokens in none", false, true, seven, 2},
          {"64 routed groups", false, true, many},
          {"300 routed groups", false, true, most},
          {"three routed groups without tokens", false, true, {0, 0, 0}}};
}

void group(GemmCase& gemm_case, const Grouped& grouped, Grouping by) {
  GemmProblem& gemm = gemm_case.gemm;
  gemm.groups.by = by;
  gemm.groups.count = static_cast<std::int64_t>(grouped.sizes.size());
  if (grouped.by_mask) {
    gemm.groups.mask = "mask";
  } else {
    gemm.groups.offsets = "offsets";
    gemm.groups.permutation = "permutation";
  }
  auto& of_groups = by == Grouping::rows ? gemm.b : gemm.c;
  for (TensorNames& names : of_groups)
    names = of_each_group(std::string(names.front()).c_str(), gemm.groups.count, grouped.stacked);
  gemm_case.group_sizes = grouped.sizes;
  gemm_case.before_groups = grouped.before;
}

void add_dense_cases(DType dtype, std::int64_t aligned, std::vector<GemmCase>& cases) {
  for (const Size ragged : {Size{1, 1, 1}, Size{37, 70, 53}, Size{130, 296, 600}})
    for (const Major a_major : {Major::k, Major::mn})
      for (const Major b_major : {Major::k, Major::mn}) {
        const Size size = round_up(ragged, a_major, b_major, aligned);
        const auto add = [&](GemmForm form, std::string_view what, const auto& change) {
          GemmProblem gemm = gemm_of(dtype, size, form, a_major, b_major);
          change(gemm);
          cases.push_back({name_of(gemm, what), gemm});
        };
        const auto nothing = [](GemmProblem&) {};
        for (const GemmForm form :
             {GemmForm::single, GemmForm::k_concatenated, GemmForm::two_outputs}) {
          add(form, "plain", nothing);
          add(form, "source", [](GemmProblem& gemm) { add_sources(gemm, false); });
        }
        add(GemmForm::two_outputs, "in place", [](GemmProblem& gemm) { add_sources(gemm, true); });
        add(GemmForm::single, "bias",
            [](GemmProblem& gemm) { gemm.epilogue.row(row_broadcast::bias) = "bias"; });
        add(GemmForm::single, "bias and source", [](GemmProblem& gemm) {
          gemm.epilogue.row(row_broadcast::bias) = "bias";
          add_sources(gemm, false);
        });
        add(GemmForm::single, "scale",
            [](GemmProblem& gemm) { gemm.epilogue.row(row_broadcast::scale) = "scale"; });
        add(GemmForm::single, "bias, scale and source", [](GemmProblem& gemm) {
          gemm.epilogue.row(row_broadcast::bias) = "bias";
          gemm.epilogue.row(row_broadcast::scale) = "scale";
          add_sources(gemm, false);
        });
        for (const bool stores : {false, true}) {
          add(GemmForm::dual_b, stores ? "gated, gate and up stored" : "gated",
              [&](GemmProblem& gemm) { make_gated(gemm, Activation::silu, stores); });
          add(GemmForm::single, stores ? "gradient and hidden" : "gradient",
              [&](GemmProblem& gemm) { make_gradient(gemm, Activation::gelu, stores); });
        }
      }
  for (const Activation activation :
       {Activation::gelu, Activation::gelu_tanh, Activation::relu, Activation::none}) {
    GemmProblem gemm = gemm_of(dtype, {19, 40, 24}, GemmForm::dual_b, Major::k, Major::k);
    make_gated(gemm, activation, false);
    cases.push_back({name_of(gemm, activation_type(activation)), gemm});
  }
}

void add_grouped_rows(DType dtype, std::int64_t aligned, std::vector<GemmCase>& cases) {
  constexpr std::int64_t tokens = 150;
  int variety = 0;
  for (const Grouped& grouped : groupings(tokens))
    for (const Major b_major : {Major::k, Major::mn})
      for (const bool a_sorted : {false, true})
        for (const bool c_sorted : {false, true}) {
          // Many matrices: small ones, and few cases.
          const bool many = grouped.sizes.size() > 100;
          if (many && (b_major == Major::mn || a_sorted == c_sorted)) continue;
          const Size size = round_up(many ? Size{tokens, 24, 20} : Size{tokens, 72, 90}, Major::k,
                                     Major::k, aligned);
          const auto add = [&](GemmForm form, const char* what, const auto& change) {
            GemmCase one{.name = "",
                         .gemm = gemm_of(dtype, size, form, Major::k, b_major),
                         .group_sizes = {}};
            one.gemm.a_sorted = a_sorted;
            one.gemm.c_sorted = c_sorted;
            group(one, grouped, Grouping::rows);
            change(one.gemm);
            one.name = name_of(one.gemm, fmt::format("rows of {}, {}", grouped.name, what));
            cases.push_back(std::move(one));
          };
          const bool odd = ++variety % 2 != 0;
          add(GemmForm::single, "plain", [](GemmProblem&) {});
          add(GemmForm::dual_b, "gated",
              [&](GemmProblem& gemm) { make_gated(gemm, Activation::silu, odd); });
          add(GemmForm::k_concatenated, "plain", [](GemmProblem&) {});
          add(GemmForm::single, "gradient",
              [&](GemmProblem& gemm) { make_gradient(gemm, Activation::silu, odd); });
        }
}

void add_grouped_reductions(DType dtype, std::vector<GemmCase>& cases) {
  constexpr std::int64_t tokens = 150;
  int variety = 0;
  for (const Grouped& grouped : groupings(tokens))
    for (const GemmForm form : {GemmForm::single, GemmForm::two_outputs})
      for (const bool a_sorted : {false, true})
        for (const bool b_sorted : {false, true}) {
          const bool many = grouped.sizes.size() > 100;
          if (many && (form != GemmForm::single || a_sorted == b_sorted)) continue;
          const Size size = many ? Size{24, 16, tokens} : Size{72, 104, tokens};
          GemmCase one{.name = "",
                       .gemm = gemm_of(dtype, size, form, Major::mn, Major::mn),
                       .group_sizes = {}};
          one.gemm.a_sorted = a_sorted;
          one.gemm.b_sorted = b_sorted;
          group(one, grouped, Grouping::reduction);
          const int kind = ++variety % 3;
          if (kind > 0) add_sources(one.gemm, kind == 2);
          one.name = name_of(one.gemm, fmt::format("reduction by {}", grouped.name));
          cases.push_back(std::move(one));
        }
}

/// Where rows, or tokens, lie in the sorted order.
struct SortedOrder {
  std::vector<std::int64_t> offsets, order;
};

SortedOrder sorted_order(const GemmProblem& gemm, const ReferenceTensors& tensors) {
  SortedOrder sorted;
  const auto values = [&](std::string_view name) { return tensors.at(std::string(name)); };
  if (gemm.groups.mask.empty()) {
    for (const double value : values(gemm.groups.offsets))
      sorted.offsets.push_back(static_cast<std::int64_t>(value));
    for (const double value : values(gemm.groups.permutation))
      sorted.order.push_back(static_cast<std::int64_t>(value));
    return sorted;
  }
  const auto mask = values(gemm.groups.mask);
  sorted.offsets = {0};
  for (const bool wanted : {true, false}) {
    for (std::size_t token = 0; token < mask.size(); ++token)
      if ((mask[token] != 0) == wanted) sorted.order.push_back(static_cast<std::int64_t>(token));
    sorted.offsets.push_back(static_cast<std::int64_t>(sorted.order.size()));
  }
  return sorted;
}

double& element(ReferenceTensors& tensors, std::string_view name, std::int64_t at) {
  return tensors.at(std::string(name)).at(static_cast<std::size_t>(at));
}

}  // namespace

std::vector<GemmCase> gemm_cases(DType dtype, std::int64_t aligned) {
  std::vector<GemmCase> cases;
  add_dense_cases(dtype, aligned, cases);
  add_grouped_rows(dtype, aligned, cases);
  add_grouped_reductions(dtype, cases);
  return cases;
}

std::vector<GemmCase> uneven_gemm_cases(DType dtype) {
  Grouped grouped{"routed", false, true, {}, 3};
  std::int64_t tokens = 5;
  for (std::int64_t rows = 0; rows < 600; rows += rows < 200 ? 7 : 61) {
    grouped.sizes.push_back(rows);
    tokens += rows;
  }
  std::vector<GemmCase> cases;
  for (const GemmForm form : {GemmForm::single, GemmForm::dual_b})
    for (const bool a_sorted : {false, true}) {
      GemmCase one{.name = "",
                   .gemm = gemm_of(dtype, {tokens, 200, 136}, form, Major::k, Major::k),
                   .group_sizes = {}};
      one.gemm.a_sorted = a_sorted;
      one.gemm.c_sorted = true;
      group(one, grouped, Grouping::rows);
      one.gemm.groups.scattered = !a_sorted;
      if (form == GemmForm::dual_b) make_gated(one.gemm, Activation::silu, false);
      one.name = name_of(one.gemm, "rows of uneven groups");
      cases.push_back(std::move(one));
    }
  return cases;
}

std::vector<GemmCase> quantised_gemm_cases() {
  std::vector<GemmCase> cases;
  for (const Size size : {Size{5, 40, 72}, Size{33, 300, 280}})
    for (const Scaling scaling : {Scaling::tensor, Scaling::block}) {
      GemmProblem gemm = gemm_of(DType::fp8, size, GemmForm::single, Major::k, Major::k);
      gemm.c_dtype = gemm.wide_dtype = DType::bf16;
      gemm.quantisation = {.scaling = scaling, .a_scale = "a_scale", .b_scale = {"b0_scale"}};
      const char* what = scaling == Scaling::tensor ? "tensor scales" : "block scales";
      cases.push_back({name_of(gemm, what), gemm});
      gemm.epilogue.row(row_broadcast::bias) = "bias";
      add_sources(gemm, false);
      cases.push_back({name_of(gemm, fmt::format("{}, bias and source", what)), gemm});

      gemm = gemm_of(DType::fp8, size, GemmForm::dual_b, Major::k, Major::k);
      gemm.wide_dtype = DType::bf16;
      gemm.quantisation = {.scaling = scaling,
                           .a_scale = "a_scale",
                           .b_scale = {"b0_scale", "b1_scale"},
                           .c_scale = "c_scale"};
      make_gated(gemm, Activation::silu, false);
      cases.push_back({name_of(gemm, fmt::format("{}, quantised", what)), gemm});
      make_gated(gemm, Activation::silu, true);
      cases.push_back({name_of(gemm, fmt::format("{}, quantised, stored", what)), gemm});
    }
  return cases;
}

std::vector<GemmCase> grouped_quantised_gemm_cases() {
  const Grouped by_mask{"mask", true, false, {60, 90}}, routed{"routed", false, true, {40, 0, 110}};
  std::vector<GemmCase> cases;
  for (const Scaling scaling : {Scaling::tensor, Scaling::block})
    for (const Grouped& grouped : {by_mask, routed})
      for (const Grouping by : {Grouping::rows, Grouping::reduction}) {
        const bool rows = by == Grouping::rows;
        const Major major = rows ? Major::k : Major::mn;
        const Size size = rows ? Size{150, 136, 264} : Size{72, 136, 150};
        GemmCase one{.name = "",
                     .gemm = gemm_of(DType::fp8, size, GemmForm::single, major, major),
                     .group_sizes = {}};
        one.gemm.c_dtype = one.gemm.wide_dtype = DType::bf16;
        one.gemm.quantisation = {.scaling = scaling, .a_scale = "a_scale", .b_scale = {"b0_scale"}};
        group(one, grouped, by);
        one.name = name_of(
            one.gemm, fmt::format("{} of {}, {}", rows ? "rows" : "reduction", grouped.name,
                                  scaling == Scaling::tensor ? "tensor scales" : "block scales"));
        cases.push_back(std::move(one));
      }
  return cases;
}

std::vector<TensorSpec> tensors_of(const GemmProblem& gemm) {
  std::vector<TensorSpec> tensors;
  const auto add = [&](std::string_view name, DType dtype, std::vector<std::int64_t> shape,
                       Role role) {
    if (name.empty()) return;
    if (const auto place = find_tensor(tensors, name)) {
      tensors[*place].role = Role::updated;  // C is its own source
      return;
    }
    TensorSpec tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.role = role;
    tensors.push_back(std::move(tensor));
  };
  const std::int64_t count = gemm.groups.count;
  const auto add_all = [&](const std::vector<TensorNames>& matrices, DType dtype, std::int64_t rows,
                           std::int64_t columns, Role role) {
    for (const TensorNames& names : matrices)
      for (const std::string_view name : names) {
        const bool stacked = gemm.groups.any() && names.size() == 1 && count > 1;
        const bool of_groups =
            (&matrices == &gemm.b && gemm.groups.by == Grouping::rows) ||
            (&matrices != &gemm.a && &matrices != &gemm.b && gemm.groups.by == Grouping::reduction);
        if (stacked && of_groups)
          add(name, dtype, {count, rows, columns}, role);
        else
          add(name, dtype, {rows, columns}, role);
      }
  };
  const auto [m, n, k] = Size{gemm.m, gemm.n, gemm.k};
  const bool a_k = gemm.a_major == Major::k, b_k = gemm.b_major == Major::k;
  add_all(gemm.a, gemm.dtype, a_k ? m : k, a_k ? k : m, Role::input);
  add_all(gemm.b, gemm.dtype, b_k ? n : k, b_k ? k : n, Role::input);
  const Epilogue& epilogue = gemm.epilogue;
  const bool reads = epilogue.kind == EpilogueKind::activation_gradient;
  for (std::size_t i = 0; i < row_broadcasts; ++i)
    add(epilogue.rows[i], gemm.dtype_of(static_cast<row_broadcast>(i)), {n}, Role::input);
  add_all(epilogue.source, gemm.wide_dtype, m, n, Role::input);
  add_all(gemm.c, gemm.c_dtype, m, n, Role::output);
  add(epilogue.gate, gemm.wide_dtype, {m, n}, reads ? Role::input : Role::output);
  add(epilogue.up, gemm.wide_dtype, {m, n}, reads ? Role::input : Role::output);
  add(epilogue.d_up, gemm.c_dtype, {m, n}, Role::output);
  add(epilogue.hidden, gemm.c_dtype, {m, n}, Role::output);
  const Quantisation& scales = gemm.quantisation;
  const bool in_blocks = scales.scaling == Scaling::block;
  const std::int64_t k_blocks = ceil_div(k, scale_block), n_blocks = ceil_div(n, scale_block);
  using Shape = std::vector<std::int64_t>;
  add(scales.a_scale, DType::f32, in_blocks ? Shape{m, k_blocks} : Shape{1}, Role::input);
  Shape of_b = in_blocks ? Shape{n_blocks, k_blocks} : Shape{1};
  if (gemm.groups.by == Grouping::rows) of_b.insert(of_b.begin(), count);
  for (const std::string_view name : scales.b_scale) add(name, DType::f32, of_b, Role::input);
  add(scales.c_scale, DType::f32, in_blocks ? Shape{m, n_blocks} : Shape{1},
      in_blocks ? Role::output : Role::input);
  const std::int64_t tokens = gemm.groups.by == Grouping::reduction ? k : m;
  add(gemm.groups.mask, DType::u8, {tokens}, Role::input);
  add(gemm.groups.offsets, DType::i32, {count + 1}, Role::input);
  add(gemm.groups.permutation, DType::i32, {tokens}, Role::input);
  return tensors;
}

std::vector<TensorSpec> tensors_of_chain(const GemmChain& chain) {
  std::vector<TensorSpec> specs;
  for (const GemmProblem& gemm : chain)
    for (const TensorSpec& spec : tensors_of(gemm))
      if (!find_tensor(specs, spec.name)) specs.push_back(spec);
  return specs;
}

ReferenceTensors draw_inputs(const GemmCase& gemm_case, std::uint64_t seed) {
  const GemmProblem& gemm = gemm_case.gemm;
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  ReferenceTensors tensors;
  for (const TensorSpec& tensor : tensors_of(gemm)) {
    auto& values = tensors[tensor.name];
    values.assign(static_cast<std::size_t>(tensor.elements()), nan);
    if (tensor.role == Role::output) continue;
    const bool is_scale = tensor.name.ends_with("_scale");
    for (double& value : values)
      value = round_to(tensor.dtype, is_scale ? 0.5 + std::abs(normal(random)) : normal(random));
  }
  if (!gemm.groups.any()) return tensors;
  // The group of each token is drawn too; tokens of a group are in ascending order.
  const std::int64_t tokens = gemm.groups.by == Grouping::reduction ? gemm.k : gemm.m;
  std::vector<std::int64_t> shuffled(static_cast<std::size_t>(tokens));
  std::iota(shuffled.begin(), shuffled.end(), 0);
  std::shuffle(shuffled.begin(), shuffled.end(), random);
  auto first = shuffled.begin() + gemm_case.before_groups;
  std::vector<double> offsets{static_cast<double>(gemm_case.before_groups)};
  for (const std::int64_t size : gemm_case.group_sizes) {
    std::sort(first, first + size);
    first += size;
    offsets.push_back(static_cast<double>(first - shuffled.begin()));
  }
  if (gemm.groups.mask.empty()) {
    tensors.at(std::string(gemm.groups.offsets)) = offsets;
    tensors.at(std::string(gemm.groups.permutation)).assign(shuffled.begin(), shuffled.end());
    return tensors;
  }
  auto& mask = tensors.at(std::string(gemm.groups.mask));
  std::fill(mask.begin(), mask.end(), 0.0);
  for (std::int64_t i = 0; i < gemm_case.group_sizes.front(); ++i)
    mask[static_cast<std::size_t>(shuffled[static_cast<std::size_t>(i)])] =
        static_cast<double>(1 + i % 255);
  return tensors;
}

namespace {

struct Sum {
  double value = 0, magnitude = 0;
};

/// Adds the products of two strided runs, four sums at a time: no addition waits for the one
/// before.
void add_products(const double* a, std::int64_t a_step, const double* b, std::int64_t b_step,
                  std::int64_t count, Sum& sum) {
  Sum parts[4];
  const auto add = [&](Sum& part) {
    const double product = *a * *b;
    part.value += product;
    part.magnitude += std::abs(product);
    a += a_step;
    b += b_step;
  };
  std::int64_t left = count;
  for (; left >= 4; left -= 4)
    for (Sum& part : parts) add(part);
  for (; left > 0; --left) add(sum);
  for (const Sum& part : parts) {
    sum.value += part.value;
    sum.magnitude += part.magnitude;
  }
}

}  // namespace

void reference_gemm(const GemmProblem& gemm, ReferenceTensors& tensors,
                    ReferenceTensors& magnitudes) {
  const Epilogue& epilogue = gemm.epilogue;
  const bool by_rows = gemm.groups.by == Grouping::rows;
  const bool by_k = gemm.groups.by == Grouping::reduction;
  const SortedOrder sorted = gemm.groups.any() ? sorted_order(gemm, tensors) : SortedOrder{};
  const auto token = [&](std::int64_t place, bool is_sorted) {
    return !gemm.groups.any() || is_sorted ? place : sorted.order[static_cast<std::size_t>(place)];
  };
  const auto named = [](const TensorNames& names, std::int64_t group) {
    return names.size() == 1 ? names[0] : names[static_cast<std::size_t>(group)];
  };
  const bool in_blocks = gemm.quantisation.scaling == Scaling::block;
  const std::int64_t k_blocks = ceil_div(gemm.k, scale_block);
  const std::int64_t b_scales = in_blocks ? ceil_div(gemm.n, scale_block) * k_blocks : 1;
  // The sum of pair `pair` for places `row` and `column`, over the places [first, last) of k.
  const auto add_pair = [&](Sum& sum, std::size_t a, std::size_t b, std::int64_t group,
                            std::int64_t row, std::int64_t column, std::int64_t first,
                            std::int64_t last) {
    const auto& of_a = tensors.at(std::string(gemm.a[a][0]));
    const auto& of_b = tensors.at(std::string(named(gemm.b[b], by_rows ? group : 0)));
    const std::int64_t b_base = by_rows && gemm.b[b].size() == 1 ? group * gemm.n * gemm.k : 0;
    const std::int64_t a_row = by_rows ? token(row, gemm.a_sorted) : row;
    const bool a_by_k = gemm.a_major == Major::k, b_by_k = gemm.b_major == Major::k;
    const double* const row_of_a = of_a.data() + (a_by_k ? a_row * gemm.k : a_row);
    const double* const column_of_b = of_b.data() + b_base + (b_by_k ? column * gemm.k : column);
    const std::int64_t a_step = a_by_k ? 1 : gemm.m, b_step = b_by_k ? 1 : gemm.n;
    if (!by_k && !gemm.quantisation.any())
      return add_products(row_of_a + first * a_step, a_step, column_of_b + first * b_step, b_step,
                          last - first, sum);
    for (std::int64_t place = first; place < last; ++place) {
      const std::int64_t a_k = by_k ? token(place, gemm.a_sorted) : place;
      const std::int64_t b_k = by_k ? token(place, gemm.b_sorted) : place;
      double product = row_of_a[a_k * a_step] * column_of_b[b_k * b_step];
      if (gemm.quantisation.any()) {
        const std::int64_t a_at = in_blocks ? a_row * k_blocks + a_k / scale_block : 0;
        const std::int64_t b_at =
            in_blocks ? column / scale_block * k_blocks + b_k / scale_block : 0;
        product *=
            element(tensors, gemm.quantisation.a_scale, a_at) *
            element(tensors, gemm.quantisation.b_scale[b], (by_rows ? group * b_scales : 0) + b_at);
      }
      sum.value += product;
      sum.magnitude += std::abs(product);
    }
  };
  for (std::int64_t group = 0; group < gemm.groups.count; ++group) {
    const auto offset = [&](std::int64_t index) {
      return sorted.offsets[static_cast<std::size_t>(index)];
    };
    const std::int64_t first_row = by_rows ? offset(group) : 0;
    const std::int64_t last_row = by_rows ? offset(group + 1) : gemm.m;
    const std::int64_t first_k = by_k ? offset(group) : 0;
    const std::int64_t last_k = by_k ? offset(group + 1) : gemm.k;
    for (std::size_t output = 0; output < gemm.c.size(); ++output) {
      const std::string_view c = named(gemm.c[output], by_k ? group : 0);
      const std::int64_t c_base = by_k && gemm.c[output].size() == 1 ? group * gemm.m * gemm.n : 0;
      auto& magnitude = magnitudes[std::string(c)];
      magnitude.resize(tensors.at(std::string(c)).size());
      for (std::int64_t row = first_row; row < last_row; ++row)
        for (std::int64_t column = 0; column < gemm.n; ++column) {
          Sum sums[2];
          const auto add = [&](std::size_t a, std::size_t b, Sum& sum) {
            add_pair(sum, a, b, group, row, column, first_k, last_k);
          };
          add(output, 0, sums[0]);
          if (gemm.form == GemmForm::dual_b) add(0, 1, sums[1]);
          if (gemm.form == GemmForm::k_concatenated) add(1, 1, sums[0]);
          const std::int64_t at = (by_rows ? token(row, gemm.c_sorted) : row) * gemm.n + column;
          double& result = element(tensors, c, c_base + at);
          double& own_magnitude = magnitude[static_cast<std::size_t>(c_base + at)];
          own_magnitude = sums[0].magnitude;
          switch (epilogue.kind) {
            case EpilogueKind::linear: {
              double value = sums[0].value;
              const std::string_view bias =
                  epilogue.rows[static_cast<std::size_t>(row_broadcast::bias)];
              if (!bias.empty()) value += element(tensors, bias, column);
              const std::string_view scale =
                  epilogue.rows[static_cast<std::size_t>(row_broadcast::scale)];
              if (!scale.empty()) {
                value *= element(tensors, scale, column);
                own_magnitude *= std::max(1.0, std::abs(element(tensors, scale, column)));
              }
              if (!epilogue.source.empty())
                value +=
                    element(tensors, named(epilogue.source[output], by_k ? group : 0), c_base + at);
              result = value;
              break;
            }
            case EpilogueKind::gated:
              if (!epilogue.gate.empty()) {
                element(tensors, epilogue.gate, at) = sums[0].value;
                element(tensors, epilogue.up, at) = sums[1].value;
              }
              result = activate(epilogue.activation, sums[0].value) * sums[1].value;
              own_magnitude = sums[0].magnitude * (1 + std::abs(sums[1].value)) +
                              sums[1].magnitude * (1 + std::abs(sums[0].value));
              break;
            case EpilogueKind::activation_gradient: {
              const double gate = element(tensors, epilogue.gate, at);
              const double up = element(tensors, epilogue.up, at);
              const double dc = sums[0].value;
              result = activation_gradient(epilogue.activation, gate, dc * up);
              element(tensors, epilogue.d_up, at) = dc * activate(epilogue.activation, gate);
              if (!epilogue.hidden.empty())
                element(tensors, epilogue.hidden, at) = activate(epilogue.activation, gate) * up;
              own_magnitude *= 1 + std::abs(up) + std::abs(gate);
              break;
            }
            case EpilogueKind::qkv:
              throw Error(ErrorKind::internal, "heads are for the tests of qkv");
          }
        }
    }
  }
}

GemmChain gated_layer(DType dtype, std::int64_t m, std::int64_t d, std::int64_t h) {
  GemmProblem gate_up{.m = m,
                      .n = h,
                      .k = d,
                      .dtype = dtype,
                      .c_dtype = dtype,
                      .wide_dtype = dtype,
                      .form = GemmForm::dual_b};
  gate_up.a = {{"x"}};
  gate_up.b = {{"w_gate"}, {"w_up"}};
  gate_up.c = {{"hidden"}};
  gate_up.epilogue = {.kind = EpilogueKind::gated, .activation = Activation::silu};
  GemmProblem down{.m = m, .n = d, .k = h, .dtype = dtype, .c_dtype = dtype, .wide_dtype = dtype};
  down.a = {{"hidden"}};
  down.b = {{"w_down"}};
  down.c = {{"y"}};
  return {gate_up, down};
}

std::optional<std::string> wrong_output(
    const GemmProblem& gemm, const ReferenceTensors& expected, const ReferenceTensors& magnitudes,
    const std::function<std::vector<double>(const std::string&)>& values, double accumulation) {
  for (const TensorSpec& spec : tensors_of(gemm)) {
    if (spec.role == Role::input || spec.name == gemm.quantisation.c_scale) continue;
    const auto found = values(spec.name);
    const auto& exact = expected.at(spec.name);
    const auto own = magnitudes.find(spec.name);
    const auto& magnitude = own == magnitudes.end() ? magnitudes.begin()->second : own->second;
    const bool has_scale = !gemm.quantisation.c_scale.empty() && spec.name == gemm.c[0][0];
    const auto scales =
        has_scale ? values(std::string(gemm.quantisation.c_scale)) : std::vector<double>{1.0};
    for (std::size_t i = 0; i < found.size(); ++i) {
      double scale = scales[0];
      if (scales.size() > 1) {
        const auto n = static_cast<std::size_t>(gemm.n), block = std::size_t{scale_block};
        scale = scales[i / n * ((n + block - 1) / block) + i % n / block];
      }
      const double limit = has_scale ? 448 * scale : HUGE_VAL;  // of fp8: what is beyond becomes it
      const double wanted = std::clamp(exact[i], -limit, limit);
      const double got = found[i] * scale;
      if (std::isnan(exact[i]) && std::isnan(got)) continue;  // left alone
      // A rounded element is within half a spacing, of subnormal numbers half the least one; that
      // of fp8 of the quotient by its scale.
      const double subnormal = spec.dtype == DType::fp8    ? std::ldexp(scale, -10)
                               : spec.dtype == DType::fp16 ? std::ldexp(1.0, -25)
                                                           : 0;
      const double rounding = dtype_unit_roundoff(spec.dtype) * std::abs(wanted) + subnormal;
      const double beside = accumulation * (magnitude[i] + std::abs(exact[i])) + 1e-30;
      if (std::abs(got - wanted) <= rounding * 1.001 + beside) continue;
      return fmt::format("{}[{}] is {} instead of {}", spec.name, i, got, exact[i]);
    }
  }
  return std::nullopt;
}

}  // namespace fftune::test
