// Convolutions and linears by oneDNN's matrix micro-kernel, through at::native::cpublas::brgemm.
//
// Inputs with padding, or whose pixels do not lie side by side, are first copied into a padded
// image, so that the products need no branches: one product a row of the kernel, whose K is all
// taps of that row (kw · C adjacent bytes), or a product a tap where the kernel is dilated.
#include <ATen/native/CPUBlas.h>
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "../runtime/conv_kernel.h"
#include "../runtime/errors.h"
#include "../runtime/memory.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"

namespace x86quant::runtime {
namespace {

namespace blas = at::native::cpublas;

constexpr int64_t kRows = 64;     // rows of a block of results
constexpr int64_t kColumns = 64;  // columns; a packed block may have 16, 32, 48 or 64

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// An input such that pixel x + 1 follows pixel x: the caller's own memory or a padded copy.
struct Image {
  const uint8_t* data;
  int64_t stride_n, stride_h, stride_w;
};

// Other kernels set up the tiles their way, also after a product that threw.
struct ReleaseTiles {
  ~ReleaseTiles() { blas::brgemm_release(); }
};

class BrgemmConv final : public PackedConv {
 public:
  explicit BrgemmConv(ConvDescription d) : PackedConv(d), d_(std::move(d)) {
    const xq_conv& c = d_.conv;
    TORCH_CHECK(c.groups == 1 && !c.transposed && c.kernel[0] == 1 && c.in_channels % 4 == 0,
                "x86quant: the brgemm kernel takes dense 1d and 2d convolutions of 4n channels");
    TORCH_CHECK(blas::could_pack(at::kChar), "x86quant: torch has no int8 brgemm for this CPU");
    // All taps of a row in one product where they are adjacent.
    taps_ = c.dilation[2] == 1 ? 1 : c.kernel[2];
    depth_ = c.in_channels * (c.kernel[2] / taps_);
    columns_ = round_up(c.out_channels, 16);
    products_ = int64_t{c.kernel[1]} * taps_;
    pack();
  }

  void check(const ConvCall& call) const override {
    require(call.in.c == d_.conv.in_channels && call.out.c == d_.conv.out_channels && call.in.d == 1 &&
                call.out.d == 1 && call.in.n == call.out.n &&
                (call.residual.data == nullptr || call.residual.c == call.out.c),
            "brgemm: the tensors do not fit the convolution");
    for (int axis : {1, 2}) {
      const int64_t in = axis == 1 ? call.in.h : call.in.w, out = axis == 1 ? call.out.h : call.out.w;
      const int64_t reach = int64_t{d_.conv.dilation[axis]} * (d_.conv.kernel[axis] - 1) + 1;
      require((out - 1) * d_.conv.stride[axis] + reach <= in + 2 * d_.conv.padding[axis],
              "brgemm: the output is larger than the input allows");
    }
  }

  void run(const ConvCall& call) const override {
    const int threads = threads_for(nanoseconds(call.out));
    std::optional<Scratch> copy;
    const Image image = padded(call.in, copy, threads);
    const int64_t row_blocks = (call.out.w + kRows - 1) / kRows;
    const int64_t column_blocks = (columns_ + kColumns - 1) / kColumns;
    const int64_t lines = call.out.n * call.out.h * row_blocks;
    // Blocks of columns outermost: their weights stay in the cache for all lines.
    split(lines * column_blocks, threads, [&](int64_t begin, int64_t end) {
      const Scratch memory(kRows * kColumns * sizeof(int32_t));
      const ReleaseTiles release;
      auto* sums = reinterpret_cast<int32_t*>(memory.data());
      for (int64_t item = begin; item < end; ++item)
        block(call, image, item % lines, row_blocks, item / lines, sums);
    });
  }

  int64_t bytes() const override { return static_cast<int64_t>(packed_.size()); }

 private:
  void pack() {
    const xq_conv& c = d_.conv;
    const auto* weight = d_.weight.as<int8_t>();
    const int64_t kernel_w = c.kernel[2], kernel = int64_t{c.kernel[1]} * kernel_w;
    const int64_t size = depth_ * columns_;
    packed_ = Buffer(static_cast<size_t>(products_ * size));
    const Buffer plain(static_cast<size_t>(size));
    zero_sums_.assign(static_cast<size_t>(columns_), 0);
    for (int64_t product = 0; product < products_; ++product) {
      std::memset(plain.data(), 0, static_cast<size_t>(size));
      for (int64_t k = 0; k < depth_; ++k) {
        // The tap and the channel of this row of the matrix.
        const int64_t tap = product * (kernel_w / taps_) + k / c.in_channels;
        for (int64_t n = 0; n < c.out_channels; ++n) {
          const int8_t w = weight[(n * c.in_channels + k % c.in_channels) * kernel + tap];
          plain.data()[k * columns_ + n] = static_cast<uint8_t>(w);
          zero_sums_[static_cast<size_t>(n)] += w * d_.requant.in_zp;
        }
      }
      for (int64_t n = 0; n < columns_; n += kColumns) {
        const int64_t width = std::min(kColumns, columns_ - n);
        blas::pack(depth_, width, columns_, width, at::kChar, at::kChar, plain.data() + n,
                   block_weights(product, n));
      }
    }
  }

  uint8_t* block_weights(int64_t product, int64_t column) const {
    return packed_.data() + (product * columns_ + column) * depth_;
  }

  // The input itself, or what `memory` then holds.
  Image padded(const xq_tensor& in, std::optional<Scratch>& memory, int threads) const {
    const xq_conv& c = d_.conv;
    const bool adjacent = c.kernel[2] == 1 || in.stride_w == in.c;
    if (adjacent && c.padding[1] == 0 && c.padding[2] == 0)
      return {in.data, in.stride_n, in.stride_h, in.stride_w};
    const int64_t h = in.h + 2 * c.padding[1], w = in.w + 2 * c.padding[2], line = w * in.c;
    uint8_t* copy = memory.emplace(static_cast<size_t>(in.n * h * line)).data();
    split(in.n * h, threads, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        copy_line(in, row / h, row % h - c.padding[1], copy + row * line, w);
    });
    return {copy, h * line, line, in.c};
  }

  void copy_line(const xq_tensor& in, int64_t n, int64_t y, uint8_t* to, int64_t w) const {
    const int64_t left = d_.conv.padding[2];
    const bool inside = y >= 0 && y < in.h;
    std::memset(to, d_.requant.in_zp, static_cast<size_t>(inside ? left * in.c : w * in.c));
    if (!inside) return;
    const uint8_t* from = in.data + n * in.stride_n + y * in.stride_h;
    if (in.stride_w == in.c) {
      std::memcpy(to + left * in.c, from, static_cast<size_t>(in.w * in.c));
    } else {
      for (int64_t x = 0; x < in.w; ++x)
        std::memcpy(to + (left + x) * in.c, from + x * in.stride_w, static_cast<size_t>(in.c));
    }
    std::memset(to + (left + in.w) * in.c, d_.requant.in_zp, static_cast<size_t>(left * in.c));
  }

  // A block of results: some pixels of one line, some channels.
  void block(const ConvCall& call, const Image& image, int64_t line, int64_t row_blocks,
             int64_t column_block, int32_t* sums) const {
    const xq_conv& c = d_.conv;
    const int64_t x = line % row_blocks * kRows, rows = std::min(kRows, call.out.w - x);
    const int64_t y = line / row_blocks % call.out.h, n = line / row_blocks / call.out.h;
    const int64_t column = column_block * kColumns, width = std::min(kColumns, columns_ - column);
    const uint8_t* from = image.data + n * image.stride_n + y * c.stride[1] * image.stride_h +
                          x * c.stride[2] * image.stride_w;
    for (int64_t product = 0; product < products_; ++product) {
      const int64_t tap_y = product / taps_, tap_x = product % taps_;
      const uint8_t* a = from + tap_y * c.dilation[1] * image.stride_h +
                         tap_x * c.dilation[2] * image.stride_w;
      blas::brgemm(rows, width, depth_, c.stride[2] * image.stride_w, width, width, product > 0, a,
                   reinterpret_cast<const signed char*>(block_weights(product, column)), sums);
    }
    const auto place = [&](const xq_tensor& t) {
      return t.data + n * t.stride_n + y * t.stride_h + x * t.stride_w + column;
    };
    const int64_t channels = std::min(width, call.out.c - column);
    for (int64_t i = 0; i < rows; ++i) {
      const uint8_t* residual =
          call.residual.data ? place(call.residual) + i * call.residual.stride_w : nullptr;
      uint8_t* out = place(call.out) + i * call.out.stride_w;
      requantize(sums + i * width, column, channels, residual, out);
    }
  }

  __attribute__((target("avx512f,avx512bw,avx512vl"))) void requantize(
      const int32_t* sums, int64_t column, int64_t channels, const uint8_t* residual,
      uint8_t* out) const {
    const xq_requant& r = d_.requant;
    const __m512 low = _mm512_set1_ps(static_cast<float>(r.lo - r.out_zp));
    const __m512 high = _mm512_set1_ps(static_cast<float>(r.hi - r.out_zp));
    for (int64_t i = 0; i < channels; i += 16) {
      const int64_t at = column + i;
      const auto some = static_cast<__mmask16>(_cvtu32_mask16(channels - i >= 16 ? 0xffff : (1u << (channels - i)) - 1));
      const __m512i zero = _mm512_maskz_loadu_epi32(some, zero_sums_.data() + at);
      const __m512i sum = _mm512_sub_epi32(_mm512_maskz_loadu_epi32(some, sums + i), zero);
      __m512 steps = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_maskz_loadu_ps(some, r.mult + at));
      if (r.bias) steps = _mm512_add_ps(steps, _mm512_maskz_loadu_ps(some, r.bias + at));
      if (residual) {
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(some, residual + i));
        const __m512 real = _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(r.res_zp)));
        steps = _mm512_add_ps(steps, _mm512_mul_ps(real, _mm512_set1_ps(r.res_mult)));
      }
      steps = _mm512_min_ps(_mm512_max_ps(steps, low), high);
      const __m512i codes = _mm512_add_epi32(_mm512_cvtps_epi32(steps), _mm512_set1_epi32(r.out_zp));
      _mm_mask_storeu_epi8(out + i, some, _mm512_cvtepi32_epi8(codes));
    }
    if (r.lut)
      for (int64_t i = 0; i < channels; ++i) out[i] = r.lut[out[i]];
  }

  ConvDescription d_;
  int64_t taps_, depth_, columns_, products_;
  Buffer packed_;
  std::vector<int32_t> zero_sums_;  // what the input's zero point adds to each column
};

const RegisterConvKernel brgemm("brgemm", [](ConvDescription d) -> PackedConvPtr {
  return std::make_shared<BrgemmConv>(std::move(d));
});

}  // namespace
}  // namespace x86quant::runtime
