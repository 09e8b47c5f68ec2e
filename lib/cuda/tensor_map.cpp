#include "cuda/tensor_map.hpp"

#include <fmt/format.h>

#include "core/error.hpp"

namespace fftune::cuda {
namespace {

CUtensorMapDataType type_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::fp16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::fp8:
    case DType::i8:
    case DType::u8:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    case DType::i32:
      return CU_TENSOR_MAP_DATA_TYPE_INT32;
    case DType::i64:
      return CU_TENSOR_MAP_DATA_TYPE_INT64;
    case DType::f32:
      break;
  }
  return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

/// The swizzle is as wide as the box.
CUtensorMapSwizzle swizzle_of(std::size_t box_row_bytes) {
  switch (box_row_bytes) {
    case 32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    case 64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case 128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    default:
      break;
  }
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
  const cuuint32_t box[] = {argument.box_columns, argument.box_rows, 1};
  const cuuint32_t every_element[] = {1, 1, 1};
  const cuuint32_t dimensions = argument.matrices > 0 ? 3 : 2;
  CUtensorMap map{};
  driver.accept(
      driver.tensor_map_encode_tiled(&map, type_of(argument.dtype), dimensions, address, sizes,
                                     strides, box, every_element, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                     swizzle_of(argument.box_columns * element),
                                     promotion_of(strides[0]), CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      fmt::format("cuTensorMapEncodeTiled of {}x{} in boxes of {}x{}", argument.rows,
                  argument.columns, argument.box_rows, argument.box_columns)
          .c_str());
  return map;
}

}  // namespace fftune::cuda
