#include "cuda/executable.hpp"

#include <fmt/format.h>

#include <array>
#include <cstring>

#include "core/error.hpp"
#include "core/lookup.hpp"
#include "cuda/nccl.hpp"

namespace fftune::cuda {
namespace {

CUtensorMapDataType type_of(DType dtype) {
  using enum DType;
  return value_of<DType, CUtensorMapDataType>(dtype, {{f32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32},
                                                      {bf16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16},
                                                      {fp16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16},
                                                      {fp8, CU_TENSOR_MAP_DATA_TYPE_UINT8},
                                                      {u8, CU_TENSOR_MAP_DATA_TYPE_UINT8},
                                                      {i8, CU_TENSOR_MAP_DATA_TYPE_UINT8},
                                                      {i32, CU_TENSOR_MAP_DATA_TYPE_INT32},
                                                      {i64, CU_TENSOR_MAP_DATA_TYPE_INT64}});
}

/// The swizzle is as wide as the box.
CUtensorMapSwizzle swizzle_of(std::size_t box_row_bytes) {
  if (const auto found = find_value<std::size_t, CUtensorMapSwizzle>(
          box_row_bytes, {{32, CU_TENSOR_MAP_SWIZZLE_32B},
                          {64, CU_TENSOR_MAP_SWIZZLE_64B},
                          {128, CU_TENSOR_MAP_SWIZZLE_128B}}))
    return *found;
  throw Error(ErrorKind::unavailable,
              fmt::format("a tensor map's box of {} bytes a row: 32, 64 or 128", box_row_bytes));
}

/// L2 promotion: the granularity with which a TMA load fetches from memory. Rows that do not begin
/// at an L2 line get no more than lines, since each of their pieces touches two lines already.
CUtensorMapL2promotion promotion_of(cuuint64_t row_bytes) {
  return row_bytes % 128 == 0 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                              : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
}

}  // namespace

CUtensorMap encode_tensor_map(const Driver& driver, const TensorMapArgument& argument,
                              void* address) {
  const auto element = dtype_bytes(argument.dtype);
  // The innermost dimension comes first; its stride is implied.
  const auto rows = static_cast<cuuint64_t>(argument.rows);
  const auto columns = static_cast<cuuint64_t>(argument.columns);
  const cuuint64_t sizes[] = {columns, rows, static_cast<cuuint64_t>(argument.matrices)};
  const cuuint64_t strides[] = {columns * element, rows * columns * element};
  const cuuint32_t box[] = {argument.box_columns, argument.box_rows, argument.box_matrices};
  const cuuint32_t every_element[] = {1, 1, 1};
  const cuuint32_t dimensions = argument.matrices > 0 ? 3 : 2;
  CUtensorMap map{};
  driver.accept(
      driver.tensor_map_encode_tiled(&map, type_of(argument.dtype), dimensions, address, sizes,
                                     strides, box, every_element, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                     argument.swizzled ? swizzle_of(argument.box_columns * element)
                                                       : CU_TENSOR_MAP_SWIZZLE_NONE,
                                     promotion_of(strides[0]), CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      fmt::format("cuTensorMapEncodeTiled of {}x{} in boxes of {}x{}", argument.rows,
                  argument.columns, argument.box_rows, argument.box_columns)
          .c_str());
  return map;
}

namespace {

constexpr std::size_t alignment = 256;

std::size_t aligned(std::size_t bytes) {
  return (bytes + alignment - 1) / alignment * alignment;
}

template <typename T>
std::uint64_t bits_of(T value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);  // at the front, where the driver reads the parameter
  return bits;
}

}  // namespace

WorkspaceLayout::WorkspaceLayout(const Program& program) : offsets(program.scratch.size()) {
  for (const bool zeroed : {true, false}) {
    for (std::size_t i = 0; i < program.scratch.size(); ++i) {
      if (program.scratch[i].zeroed != zeroed) continue;
      offsets[i] = bytes;
      bytes += aligned(program.scratch[i].bytes);
      if (zeroed) left_zero = left_zero && program.scratch[i].left_zero;
    }
    if (zeroed) zeroed_bytes = bytes;
  }
  library_offset = bytes;
  for (const auto& step : program.steps)
    if (std::holds_alternative<LibraryGemm>(step)) bytes = library_offset + gemm_workspace_bytes;
}

CudaExecutable::CudaExecutable(std::shared_ptr<const Session> session, const Program& program,
                               std::vector<std::shared_ptr<const LoadedKernel>> kernels,
                               std::vector<std::unique_ptr<const GemmPlan>> gemms,
                               CompileReport report)
    : session_(std::move(session)),
      layout_(program),
      kernels_(std::move(kernels)),
      gemms_(std::move(gemms)),
      report_(std::move(report)) {
  std::size_t gemm = 0;
  for (const auto& step : program.steps) {
    if (const auto* launch = std::get_if<KernelLaunch>(&step))
      steps_.emplace_back(prepare(*launch));
    else if (const auto* product = std::get_if<LibraryGemm>(&step))
      steps_.emplace_back(prepare(*product, *gemms_.at(gemm++)));
    else if (const auto* sum = std::get_if<LibrarySum>(&step))
      steps_.emplace_back(prepare(*sum));
  }
}

CudaExecutable::Value CudaExecutable::prepare(const Argument& argument) const {
  if (const auto* tensor = std::get_if<TensorArgument>(&argument))
    return {Value::Kind::tensor, tensor->tensor, tensor->offset};
  if (const auto* scratch = std::get_if<ScratchArgument>(&argument)) {
    if (scratch->scratch >= layout_.offsets.size())
      throw Error(ErrorKind::internal,
                  fmt::format("a program with {} scratch areas names number {}",
                              layout_.offsets.size(), scratch->scratch));
    return {Value::Kind::workspace, layout_.offsets[scratch->scratch] + scratch->offset};
  }
  if (const auto* number = std::get_if<std::int32_t>(&argument))
    return {Value::Kind::constant, bits_of(*number)};
  if (const auto* number = std::get_if<std::int64_t>(&argument))
    return {Value::Kind::constant, bits_of(*number)};
  if (const auto* number = std::get_if<float>(&argument))
    return {Value::Kind::constant, bits_of(*number)};
  throw Error(ErrorKind::internal, "a tensor map or an array is no single value");
}

CudaExecutable::Product CudaExecutable::prepare(const LibraryGemm& gemm,
                                                const GemmPlan& plan) const {
  const auto value = [&](const Pointer& pointer) { return prepare(argument_of(pointer)); };
  const auto scale = [&](const std::optional<Pointer>& pointer) {
    return pointer ? value(*pointer) : Value{};
  };
  return {&plan,         value(gemm.a),       value(gemm.b),
          value(gemm.c), scale(gemm.a_scale), scale(gemm.b_scale)};
}

CudaExecutable::Sum CudaExecutable::prepare(const LibrarySum& sum) const {
  const auto value = [&](const Pointer& pointer) { return prepare(argument_of(pointer)); };
  return {value(sum.x), value(sum.y), value(sum.group), static_cast<std::size_t>(sum.elements),
          sum.dtype};
}

CudaExecutable::Launch CudaExecutable::prepare(const KernelLaunch& launch) const {
  const auto& kernel = *kernels_.at(launch.kernel);
  const auto cluster_blocks = launch.cluster.x * launch.cluster.y * launch.cluster.z;
  kernel.allow(launch.shared_bytes, cluster_blocks > 8);

  Launch prepared;
  prepared.function = kernel.function();
  prepared.name = kernel.report().name.c_str();
  CUlaunchConfig& config = prepared.config;
  config.gridDimX = launch.grid.x;
  config.gridDimY = launch.grid.y;
  config.gridDimZ = launch.grid.z;
  config.blockDimX = launch.block.x;
  config.blockDimY = launch.block.y;
  config.blockDimZ = launch.block.z;
  config.sharedMemBytes = launch.shared_bytes;
  if (cluster_blocks > 1) {
    auto& attribute = prepared.attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim.x = launch.cluster.x;
    attribute.value.clusterDim.y = launch.cluster.y;
    attribute.value.clusterDim.z = launch.cluster.z;
  }
  if (launch.programmatic) {
    auto& attribute = prepared.attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.cooperative) {
    auto& attribute = prepared.attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attribute.value.cooperative = 1;
  }
  place_parameters(prepared, launch);
  if (cluster_blocks > 1) {
    int clusters = 0;
    config.attrs = prepared.attributes.data();
    const Driver& driver = session_->driver();
    driver.accept(driver.occupancy_max_active_clusters(&clusters, prepared.function, &config),
                  "cuOccupancyMaxActiveClusters");
    config.attrs = nullptr;
    if (clusters == 0)
      throw Error(ErrorKind::unavailable,
                  fmt::format("{}: no cluster of {} blocks fits this device", prepared.name,
                              cluster_blocks));
  }
  return prepared;
}

void CudaExecutable::place_parameters(Launch& prepared, const KernelLaunch& launch) const {
  if (launch.parameters) {
    prepared.parameters = {0};
    prepared.image.resize(launch.parameters->bytes);
    for (const auto& [offset, value] : launch.parameters->fields) place(prepared, offset, value);
  } else {
    for (const Argument& argument : launch.arguments) {
      const std::size_t alignment = std::holds_alternative<TensorMapArgument>(argument) ? 64 : 8;
      const std::size_t offset = (prepared.image.size() + alignment - 1) / alignment * alignment;
      prepared.image.resize(offset + argument_bytes(argument));
      prepared.parameters.push_back(offset);
      place(prepared, offset, argument);
    }
  }
  if (prepared.image.size() > most_parameter_bytes || prepared.parameters.size() > most_parameters)
    throw Error(ErrorKind::internal,
                fmt::format("a launch with {} parameters of {} bytes: at most {} of {}",
                            prepared.parameters.size(), prepared.image.size(), most_parameters,
                            most_parameter_bytes));
}

void CudaExecutable::place(Launch& launch, std::size_t offset, const Argument& argument) const {
  if (offset + argument_bytes(argument) > launch.image.size())
    throw Error(ErrorKind::internal, fmt::format("a field at {} of {} bytes of parameters", offset,
                                                 launch.image.size()));
  std::byte* const to = launch.image.data() + offset;
  if (const auto* map = std::get_if<TensorMapArgument>(&argument)) {
    if (offset % 64 != 0)
      throw Error(ErrorKind::internal,
                  fmt::format("a tensor map at {}: no multiple of 64", offset));
    const CUtensorMap encoded =
        encode_tensor_map(session_->driver(), *map, session_->placeholder());
    std::memcpy(to, &encoded, sizeof encoded);
    launch.maps.push_back(
        {offset, prepare(argument_of(map->matrix)), static_cast<std::uint64_t>(map->offset)});
  } else if (const auto* array = std::get_if<ArrayArgument>(&argument)) {
    std::memcpy(to, array->values.data(), argument_bytes(argument));
  } else {
    const Value value = prepare(argument);
    if (value.kind == Value::Kind::constant)
      std::memcpy(to, &value.number, argument_bytes(argument));
    else
      launch.pointers.push_back({offset, value});
  }
}

std::uint64_t CudaExecutable::resolve(const Value& value, void* const* tensors,
                                      std::uint64_t workspace) {
  switch (value.kind) {
    case Value::Kind::tensor:
      return device_address(tensors[value.number]) + value.offset;
    case Value::Kind::workspace:
      return workspace + value.number;
    case Value::Kind::constant:
      break;
  }
  return value.number;
}

CUresult CudaExecutable::start(const Launch& launch, void** addresses, CUstream stream) const {
  const Driver& driver = session_->driver();
  CUlaunchConfig config = launch.config;
  // Without attributes the older call takes the driver less time.
  if (config.numAttrs == 0)
    return driver.launch_kernel(launch.function, config.gridDimX, config.gridDimY, config.gridDimZ,
                                config.blockDimX, config.blockDimY, config.blockDimZ,
                                config.sharedMemBytes, stream, addresses, nullptr);
  auto attributes = launch.attributes;
  config.attrs = attributes.data();
  config.hStream = stream;
  return driver.launch_kernel_ex(&config, launch.function, addresses, nullptr);
}

void CudaExecutable::enqueue_launch(const Launch& launch, void* const* tensors,
                                    std::uint64_t workspace, CUstream stream) const {
  alignas(64) std::array<std::byte, most_parameter_bytes> image;
  std::memcpy(image.data(), launch.image.data(), launch.image.size());
  for (const Patch& pointer : launch.pointers) {
    const std::uint64_t address = resolve(pointer.address, tensors, workspace);
    std::memcpy(image.data() + pointer.offset, &address, sizeof address);
  }
  const Driver& driver = session_->driver();
  for (const Patch& map : launch.maps) {
    const std::uint64_t address = resolve(map.address, tensors, workspace) + map.shift;
    driver.check(
        driver.tensor_map_replace_address(reinterpret_cast<CUtensorMap*>(image.data() + map.offset),
                                          reinterpret_cast<void*>(address)),
        "cuTensorMapReplaceAddress");
  }
  std::array<void*, most_parameters> addresses;
  for (std::size_t i = 0; i < launch.parameters.size(); ++i)
    addresses[i] = image.data() + launch.parameters[i];
  const CUresult result = start(launch, addresses.data(), stream);
  if (result != CUDA_SUCCESS) driver.fail(result, fmt::format("launch of {}", launch.name).c_str());
}

void CudaExecutable::enqueue_steps(void* const* tensors, void* workspace, void* stream,
                                   bool clears) const {
  const Driver& driver = session_->driver();
  // A thread that has no context yet gets the primary one, as from the CUDA runtime; one that has a
  // context keeps it.
  CUcontext current = nullptr;
  driver.check(driver.ctx_get_current(&current), "cuCtxGetCurrent");
  if (current == nullptr)
    driver.check(driver.ctx_set_current(session_->context()->handle()), "cuCtxSetCurrent");

  const auto base = device_address(workspace);
  if (layout_.bytes != 0 && (base == 0 || base % alignment != 0))
    throw Error(ErrorKind::invalid_input,
                fmt::format("the workspace at {} must be {} bytes, aligned to {}", workspace,
                            layout_.bytes, alignment));
  if (clears && layout_.zeroed_bytes != 0)
    driver.check(driver.memset_d32_async(base, 0, layout_.zeroed_bytes / 4, as_stream(stream)),
                 "cuMemsetD32Async of the scratch");
  for (const auto& step : steps_) {
    if (const auto* launch = std::get_if<Launch>(&step)) {
      enqueue_launch(*launch, tensors, base, as_stream(stream));
      continue;
    }
    const auto at = [&](const Value& value) { return resolve(value, tensors, base); };
    if (const auto* sum = std::get_if<Sum>(&step)) {
      const auto pointer = [&](const Value& value) { return reinterpret_cast<void*>(at(value)); };
      sum_of_group(pointer(sum->group), pointer(sum->x), pointer(sum->y), sum->elements, sum->dtype,
                   stream);
      continue;
    }
    const auto& product = std::get<Product>(step);
    product.plan->enqueue(
        {at(product.a), at(product.b), at(product.c), at(product.a_scale), at(product.b_scale)},
        base + layout_.library_offset, as_stream(stream));
  }
}

}  // namespace fftune::cuda
