#include <array>

#include "kernels/check.hpp"
#include "kernels/nsa/call.hpp"
#include "kernels/nsa/combine.tile.hpp"
#include "kernels/rows.hpp"

namespace tw {

namespace {

using namespace kernels;
using namespace kernels::nsa;

constexpr const char* kOp = "nsa_combine";
constexpr const char* kOutputs[] = {"outputs[0]", "outputs[1]", "outputs[2]"};
constexpr const char* kGates[] = {"gates[0]", "gates[1]", "gates[2]"};

/// [batch, seqlen, heads] with a column for each head.
Tensor with_column(const Tensor& t) {
  return Tensor::borrow(t.data(), {t.shape(0), t.shape(1), t.shape(2), 1}, t.dtype(), t.device(),
                        {t.stride(0), t.stride(1), t.stride(2), 1});
}

template <class T, class Gate>
void run_combine(const Tensor& o, const std::array<const Tensor*, 3>& outputs, const std::array<const Tensor*, 3>& gates,
                 const Stream& stream) {
  const TileGrid grid{.m = ceil_div(static_cast<int>(o.shape(2)), kCombinedHeads), .batch = static_cast<int>(o.shape(0) * o.shape(1))};
  std::array<Tensor, 3> columns;
  for (std::size_t n = 0; n < columns.size(); ++n)
    if (outputs[n]) columns[n] = with_column(*gates[n]);
  launch<Combine<T, Gate, kCombinedHeads, kCombinedColumns>>(stream, grid, [&](auto& bind, auto& p) {
    bind(p.o, o);
    std::size_t n = 0;
    for (auto* const branch : {&p.first, &p.second, &p.third}) {
      bind(branch->output, outputs[n]);
      bind(branch->gate, outputs[n] ? &columns[n] : nullptr);
      ++n;
    }
  });
}

}  // namespace

void nsa_combine(const Tensor& o, std::array<const Tensor*, 3> outputs, std::array<const Tensor*, 3> gates,
                 const std::optional<Stream>& stream) {
  const Device device = o.device();
  require(is_float(o.dtype()), "{}: o is {}; f32, f16 and bf16 are supported", kOp, o);
  check_operand(kOp, "o", o, o.dtype(), device);
  require(o.rank() == 4 && o.shape(3) <= kCombinedColumns,
          "{}: o is {}; it must be [batch, seqlen, heads, value_dim], with up to {} columns", kOp, o, kCombinedColumns);
  check_columns(kOp, "o", o);
  check_output(kOp, "o", o);
  const Shape per_head{o.shape(0), o.shape(1), o.shape(2)};
  DType gate_dtype = o.dtype();
  for (std::size_t n = 0; n < outputs.size(); ++n) {
    const Tensor* const output = outputs[n];
    const Tensor* const gate = gates[n];
    if (!output) continue;
    require(gate != nullptr, "{}: there is an {} but no {}", kOp, kOutputs[n], kGates[n]);
    check_operand(kOp, kOutputs[n], *output, o.dtype(), device);
    require(output->shape() == o.shape(), "{}: {} is {}; it must have o's shape, {}", kOp, kOutputs[n], *output, o);
    check_columns(kOp, kOutputs[n], *output);
    check_in_place(kOp, {"o", &o}, {kOutputs[n], output});
    require(gate->dtype() == o.dtype() || gate->dtype() == DType::f32, "{}: {} is {}; it must be f32 or {}", kOp, kGates[n], *gate,
            name_of(o.dtype()));
    require(gate_dtype == o.dtype() || gate->dtype() == gate_dtype, "{}: {} is {}; all gates must have one dtype", kOp, kGates[n], *gate);
    check_operand(kOp, kGates[n], *gate, gate->dtype(), device);
    require(gate->shape() == per_head, "{}: {} is {}; it must be [{}]", kOp, kGates[n], *gate, tw::join(per_head, ", "));
    check_disjoint(kOp, {"o", &o}, {{kGates[n], gate}});
    gate_dtype = gate->dtype();
  }
  const Stream on = checked_stream(kOp, stream, device);
  if (o.numel() == 0) return;
  with_float_type(o.dtype(), [&]<class T>(std::type_identity<T>) {
    gate_dtype == o.dtype() ? run_combine<T, T>(o, outputs, gates, on) : run_combine<T, float>(o, outputs, gates, on);
  });
}

}  // namespace tw
