#include "tilewave/nsa.hpp"

#include <cmath>

#include "kernels/check.hpp"
#include "kernels/nsa/call.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/elementwise.hpp"

namespace tw {

namespace {

using namespace kernels::nsa;
using kernels::kLargestExtent;
using kernels::workspace;

/// Calls run(o) with o as rows [tokens * heads, value_dim]. An o that is not laid out like that is copied to from memory that is.
template <class Run>
void with_rows(const Tensor& o, const Stream& stream, Run run) {
  if (are_rows(o)) return run(as_rows(o));
  const Tensor rows = workspace(o.shape(), o.dtype(), stream);
  run(as_rows(rows));
  cast(rows, o, {.stream = stream});
}

void attend(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor* block_indices, const Tensor& o,
            const NsaOptions& options) {
  Call call = check_call(op, q, k, v, block_indices, options);
  check_operand(op, "o", o, q.dtype(), call.stream.device());
  const Shape expected{q.shape(0), q.shape(1), q.shape(2), v.shape(3)};
  require(o.shape() == expected, "{}: o is {}; it must be {}[{}]", op, o, name_of(q.dtype()), tw::join(expected, ", "));
  check_columns(op, "o", o);
  check_output(op, "o", o);
  const NamedTensor inputs[] = {{"q", &q},
                                {"k", &k},
                                {"v", &v},
                                {"block_indices", block_indices},
                                {"block_counts", options.block_counts},
                                {"cu_seqlens", options.cu_seqlens},
                                {"cu_seqlens_k", options.cu_seqlens_k},
                                {"seqlens", options.seqlens}};
  for (const NamedTensor& input : inputs) check_disjoint(op, {"o", &o}, {input});
  if (options.lse) {
    call.lse = per_head(op, "lse", *options.lse, q)->data<float>();
    for (const NamedTensor& input : inputs) check_disjoint(op, {"lse", options.lse}, {input, {"o", &o}});
  }
  if (o.numel() == 0) return;
  fit_operands(call, q, k, v);
  with_rows(o, call.stream, [&](const Tensor& rows) {
    call.o = rows;
    run(call);
  });
}

}  // namespace

void nsa_selected(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& block_indices, const Tensor& o,
                  const NsaOptions& options) {
  attend("nsa_selected", q, k, v, &block_indices, o, options);
}

void nsa_compressed(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const NsaOptions& options) {
  attend("nsa_compressed", q, k, v, nullptr, o, options);
}

}  // namespace tw
