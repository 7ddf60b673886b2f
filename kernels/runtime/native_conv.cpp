// The native kernels as a provider of the runtime.
#include "conv_kernel.h"
#include "errors.h"
#include "native_cpu.h"
#include "packing.h"
#include "parallel.h"
#include "scratch.h"
#include "weights_memory.h"

namespace x86quant::runtime {
namespace {

class NativeConv final : public PackedConv {
 public:
  explicit NativeConv(const ConvDescription& d) : PackedConv(d) {
    const int isa = native_isa();
    const size_t size = xq_conv_packed_size(&d.conv, isa);
    require(size > 0, "the native kernel refuses this convolution");
    if (fits(d.packed, size) && xq::is_packed_for(&d.conv, isa, &d.requant, d.packed->data)) {
      packed_ = *d.packed;
      return;
    }
    const auto fresh = std::make_shared<Buffer>(among_others(size));
    succeed(xq::pack_shared(&d.conv, isa, d.weight.as<int8_t>(), &d.requant, fresh->data(),
                            share_of_packing(d.weight.count)));
    packed_ = {fresh->data(), Type::kByte, static_cast<int64_t>(size), fresh};
  }

  void check(const ConvCall& call) const override {
    const xq_conv_call native = native_call(call);
    succeed(xq_conv_check(&native));
  }

  void run(const ConvCall& call) const override {
    xq_conv_call native = native_call(call);
    native.threads = threads_for(nanoseconds(call.out));
    const size_t scratch = xq_conv_scratch(&native);
    split(xq_conv_items(&native), native.threads, [&](int64_t begin, int64_t end) {
      xq_conv_run(&native, begin, end, Scratch(scratch).data());
    });
  }

  int64_t bytes() const override { return packed_.count; }
  Table blob() const override { return packed_; }

 private:
  xq_conv_call native_call(const ConvCall& call) const {
    xq_conv_call native{};
    native.packed = packed_.data;
    native.in = call.in;
    native.out = call.out;
    native.residual = call.residual;
    native.threads = 1;
    return native;
  }

  Table packed_;
};

const RegisterConvKernel native("native", [](ConvDescription d) -> PackedConvPtr {
  return std::make_shared<NativeConv>(d);
});

}  // namespace
}  // namespace x86quant::runtime
