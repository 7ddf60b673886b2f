// What calibration asks of many floats: how many lie in each bin, and what they are as codes say them.
#include <algorithm>
#include <cmath>
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

// Adds to `counts` how many of the values lie in each bin [n, n + 1) / factor, of which the first is `start`; false if one
// lies in none.
bool count(const float* x, int64_t values, float factor, int64_t start, std::vector<int64_t>& counts) {
  constexpr float kFar = 1 << 30;
  const auto bins = static_cast<int64_t>(counts.size());
  for (int64_t i = 0; i < values; ++i) {
    const float place = x[i] * factor;
    if (!(std::fabs(place) < kFar)) return false;
    const auto whole = static_cast<int32_t>(place);
    const int64_t bin = whole - (place < static_cast<float>(whole)) - start;
    if (bin < 0 || bin >= bins) return false;
    ++counts[static_cast<size_t>(bin)];
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
    X86QUANT_REQUIRE(bins > 0 && bins < (1 << 30), "there are no ", bins, " bins");
    NewTensor out(Type::kLong, {bins});
    bool all = true;
    without_gil([&] {
      std::vector<int64_t> total(static_cast<size_t>(bins));
      std::mutex mutex;
      runtime::split(values, runtime::threads_for(kCounting * static_cast<double>(values)), [&](int64_t begin, int64_t end) {
        std::vector<int64_t> own(static_cast<size_t>(bins));
        const bool inside = count(from + begin, end - begin, factor, start, own);
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
