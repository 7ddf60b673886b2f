// Row codes as three tensors: codes uint8 [..., K], scales float32 [...], zero points int32 [...].
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>
#include <vector>

#include "../native/native_rows.h"

namespace x86quant::dynamic {

using RowCodes = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

inline RowCodes new_row_codes(at::IntArrayRef shape) {
  const at::IntArrayRef rows = shape.slice(0, shape.size() - 1);
  return {at::empty(shape, at::kByte), at::empty(rows, at::kFloat), at::empty(rows, at::kInt)};
}

inline RowCodes no_row_codes() { return {at::empty({0}, at::kByte), at::empty({0}, at::kFloat), at::empty({0}, at::kInt)}; }

// Where the native kernels write.
inline xq_codes written(RowCodes& c) {
  return {std::get<0>(c).mutable_data_ptr<uint8_t>(), std::get<1>(c).mutable_data_ptr<float>(),
          std::get<2>(c).mutable_data_ptr<int32_t>()};
}

// Row codes that are read: checked, and contiguous.
class Operand {
 public:
  Operand(const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zp, int64_t features)
      : codes_(codes.contiguous()), scale_(scale.contiguous()), zp_(zp.contiguous()) {
    TORCH_CHECK_VALUE(codes.device().is_cpu() && codes.scalar_type() == at::kByte && codes.dim() > 0 &&
                          codes.size(-1) == features,
                      "x86quant: expected uint8 codes of ", features, " features, got ", codes.scalar_type(), " ",
                      codes.sizes());
    rows_ = 1;
    for (int64_t i = 0; i + 1 < codes.dim(); ++i) rows_ *= codes.size(i);
    TORCH_CHECK_VALUE(scale.scalar_type() == at::kFloat && zp.scalar_type() == at::kInt && scale.numel() == rows_ &&
                          zp.numel() == rows_,
                      "x86quant: expected a float32 scale and an int32 zero point for each of ", rows_,
                      " rows of codes, got ", scale.scalar_type(), " ", scale.sizes(), " and ", zp.scalar_type(), " ",
                      zp.sizes());
    const int32_t* zps = zp_.const_data_ptr<int32_t>();
    for (int64_t i = 0; i < rows_; ++i)
      TORCH_CHECK_VALUE(zps[i] >= 0 && zps[i] <= 255, "x86quant: row ", i, " has the zero point ", zps[i],
                        ", which no code can have; it must be from 0 to 255");
  }

  int64_t rows() const { return rows_; }

  std::vector<int64_t> shape_with(int64_t features) const {
    std::vector<int64_t> shape = codes_.sizes().vec();
    shape.back() = features;
    return shape;
  }

  // Operands are only read.
  xq_codes view() const {
    return {const_cast<uint8_t*>(codes_.const_data_ptr<uint8_t>()), const_cast<float*>(scale_.const_data_ptr<float>()),
            const_cast<int32_t*>(zp_.const_data_ptr<int32_t>())};
  }

 private:
  at::Tensor codes_, scale_, zp_;
  int64_t rows_;
};

}  // namespace x86quant::dynamic
