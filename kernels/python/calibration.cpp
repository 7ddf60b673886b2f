// What calibration asks of many floats: how many lie in each bin, and what they are as codes say them.
#include <emmintrin.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "../runtime/parallel.h"
#include "arguments.h"
#include "module.h"

namespace x86quant::python {
namespace {

// Nanoseconds that one value takes, which tells how many threads are worth it.
constexpr double kCounting = 1, kRounding = 0.3;

const float* floats_of(const Tensor& x) {
  X86QUANT_REQUIRE(x->type == Type::kFloat && x->is_cpu && x->is_contiguous(), "values must be contiguous float32, got ",
                   name_of(x->type), " ", x->text());
  return x->as<float>();
}

// How many values are looked at before they are counted, and how many counts there are of each bin: values that are alike,
// such as the zeros that ReLU makes, would wait for each other at a single one.
constexpr int64_t kAhead = 1024, kTables = 4;
// How many values one table of 32 bits can surely count.
constexpr int64_t kMost = int64_t{1} << 31;

// No bin lies further from zero. What does, infinity and NaN are put there, in none.
constexpr int32_t kFar = 1 << 29;

// The bins [n, n + 1) / factor that four values lie in, counted from `start`.
__m128i four_bins(__m128 x, float factor, int32_t start) {
  __m128 place = _mm_min_ps(_mm_mul_ps(x, _mm_set1_ps(factor)), _mm_set1_ps(kFar));  // of a NaN the second
  place = _mm_max_ps(place, _mm_set1_ps(-kFar));
  const __m128i whole = _mm_cvttps_epi32(place);
  const __m128i below = _mm_castps_si128(_mm_cmplt_ps(place, _mm_cvtepi32_ps(whole)));  // -1 where it was rounded up
  return _mm_sub_epi32(_mm_add_epi32(whole, below), _mm_set1_epi32(start));
}

// The bins of `values` values, for which `found` has room up to the next multiple of four; false if one lies in none.
bool find_bins(const float* x, int64_t values, float factor, int32_t start, int32_t bins, int32_t* found) {
  const __m128i last = _mm_set1_epi32(bins - 1);
  __m128i outside = _mm_setzero_si128();  // negative where one is
  for (int64_t i = 0; i < values; i += 4) {
    float rest[4];
    for (int64_t j = 0; j < 4 && values - i < 4; ++j) rest[j] = x[std::min(i + j, values - 1)];
    const __m128i bin = four_bins(_mm_loadu_ps(values - i < 4 ? rest : x + i), factor, start);
    outside = _mm_or_si128(outside, _mm_or_si128(bin, _mm_sub_epi32(last, bin)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(found + i), bin);
  }
  return _mm_movemask_ps(_mm_castsi128_ps(outside)) == 0;
}

// Adds to `counts` how many of the values lie in each bin; false if one lies in none.
bool count(const float* x, int64_t values, float factor, int32_t start, std::vector<int64_t>& counts) {
  const size_t bins = counts.size();
  std::vector<uint32_t> tables(kTables * bins);
  int32_t found[kAhead];
  for (int64_t first = 0; first < values; first += kAhead) {
    const int64_t here = std::min(kAhead, values - first);
    if (!find_bins(x + first, here, factor, start, static_cast<int32_t>(bins), found)) return false;
    for (int64_t i = 0; i < here; ++i) ++tables[static_cast<size_t>(i % kTables) * bins + static_cast<size_t>(found[i])];
  }
  for (size_t table = 0; table < kTables; ++table) {
    for (size_t bin = 0; bin < bins; ++bin) counts[bin] += tables[table * bins + bin];
  }
  return true;
}

// count_bins(x, factor, start, bins): how many of the contiguous float32 `x` have floor(x * factor) = start, start + 1, ...
PyObject* count_bins(PyObject*, PyObject* const* args, Py_ssize_t given) {
  return answer([&] {
    const Arguments a("count_bins", args, given, 4);
    const Tensor x = a.tensor(0);
    const float* from = floats_of(x);
    const auto factor = static_cast<float>(a.real(1));
    const int64_t start = a.integer(2), bins = a.integer(3), values = x->count();
    X86QUANT_REQUIRE(bins > 0 && bins < kFar && start > -kFar && start + bins <= kFar, "there are no ", bins,
                     " bins from ", start, " on");
    NewTensor out(Type::kLong, {bins});
    bool all = true;
    without_gil([&] {
      std::vector<int64_t> total(static_cast<size_t>(bins));
      std::mutex mutex;
      runtime::split(values, runtime::threads_for(kCounting * static_cast<double>(values)), [&](int64_t begin, int64_t end) {
        std::vector<int64_t> own(static_cast<size_t>(bins));
        bool inside = true;
        for (; begin < end; begin += kMost) {
          inside = inside && count(from + begin, std::min(kMost, end - begin), factor, static_cast<int32_t>(start), own);
        }
        const std::lock_guard lock(mutex);
        all = all && inside;
        for (size_t i = 0; i < own.size(); ++i) total[i] += own[i];
      });
      std::copy(total.begin(), total.end(), out.data<int64_t>());
    });
    X86QUANT_REQUIRE(all, "a value lies outside of the ", bins, " bins");
    return out.release();
  });
}

// As the difference to 1.5 * 2^23 floats have no place behind the point. Bounds are whole, so values may be clamped first,
// after which they are small enough. A NaN stays.
void round_between(const float* x, int64_t values, float factor, float low, float high, float step, float* out) {
  constexpr float kWhole = 12582912;
  for (int64_t i = 0; i < values; ++i) {
    float v = x[i] * factor;
    v = v < low ? low : v;
    v = v > high ? high : v;
    out[i] = (v + kWhole - kWhole) * step;
  }
}

// round_floats(x, factor, low, high, step, out): the contiguous float32 `x` times `factor`, rounded half to even between
// `low` and `high`, times `step`, written to `out`, which may be `x`.
PyObject* round_floats(PyObject*, PyObject* const* args, Py_ssize_t given) {
  return answer([&] {
    const Arguments a("round_floats", args, given, 6);
    const Tensor x = a.tensor(0), out = a.tensor(5);
    const float* from = floats_of(x);
    auto* to = const_cast<float*>(floats_of(out));
    const auto factor = static_cast<float>(a.real(1)), step = static_cast<float>(a.real(4));
    const int64_t low = a.integer(2), high = a.integer(3), count = x->count();
    X86QUANT_REQUIRE(out->count() == count, "there are ", count, " values, and room for ", out->count());
    X86QUANT_REQUIRE(low <= high && low > -(1 << 22) && high < (1 << 22), "codes between ", low, " and ", high, " are none");
    without_gil([&] {
      runtime::split(count, runtime::threads_for(kRounding * static_cast<double>(count)), [&](int64_t begin, int64_t end) {
        round_between(from + begin, end - begin, factor, static_cast<float>(low), static_cast<float>(high), step, to + begin);
      });
    });
    return none();
  });
}

PyMethodDef functions[] = {
    {"count_bins", as_method(count_bins), METH_FASTCALL, nullptr},
    {"round_floats", as_method(round_floats), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

Part calibration_part() { return {functions, nullptr}; }

}  // namespace x86quant::python
