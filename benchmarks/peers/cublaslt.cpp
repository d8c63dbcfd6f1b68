#include "benchmarks/peers/cublaslt.hpp"

#include <span>
#include <vector>

#include "benchmarks/peers/library.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::bench {

using namespace cublaslt;

namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;  // what NVIDIA recommends on Hopper
constexpr int kAlgorithms = 8;
constexpr float kOne = 1;
constexpr float kZero = 0;

void check(const Calls& calls, Status status, const char* call) {
  if (status != kSuccess) throw Error(tw::format("{}: {}", call, calls.status_text(status)));
}

DataType data_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return DataType::r_32f;
    case DType::f16:
      return DataType::r_16f;
    case DType::bf16:
      return DataType::r_16bf;
    case DType::fp8_e4m3:
      return DataType::r_8f_e4m3;
    default:
      throw InvalidArgument(tw::format("cublasLt: dtype is {}; allowed: f32, f16, bf16, fp8_e4m3", name_of(dtype)));
  }
}

/// cuBLASLt's matrices are column-major; the same memory read that way is the transpose. So what is asked of it is D^T = B^T A^T: our B is
/// its first operand.
struct ColumnMajor {
  std::uint64_t rows, cols;
  std::int64_t leading;
  Operation operation;
};

ColumnMajor transposed(const Tensor& t) {
  if (t.stride(1) == 1) {
    return {static_cast<std::uint64_t>(t.shape(1)), static_cast<std::uint64_t>(t.shape(0)), t.stride(0), Operation::none};
  }
  if (t.stride(0) == 1) {
    return {static_cast<std::uint64_t>(t.shape(0)), static_cast<std::uint64_t>(t.shape(1)), t.stride(1), Operation::transpose};
  }
  throw InvalidArgument(tw::format("cublasLt: {} has no contiguous dimension", t.describe()));
}

}  // namespace

struct CublasLtProduct::State {
  const Calls* calls = nullptr;
  Handle handle = nullptr;
  MatmulDesc desc = nullptr;
  MatrixLayout first_layout = nullptr, second_layout = nullptr, d_layout = nullptr;
  Tensor first, second, d, scale;
  Stream stream;
  std::shared_ptr<void> workspace;
  std::vector<HeuristicResult> algorithms;

  explicit State(const Stream& stream) : stream(stream) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    for (MatrixLayout layout : {first_layout, second_layout, d_layout}) {
      if (layout != nullptr) calls->layout_destroy(layout);
    }
    if (desc != nullptr) calls->desc_destroy(desc);
  }
};

CublasLtProduct::CublasLtProduct(std::unique_ptr<State> state) : state_(std::move(state)) {}
CublasLtProduct::~CublasLtProduct() = default;

int CublasLtProduct::algorithms() const { return static_cast<int>(state_->algorithms.size()); }

void CublasLtProduct::launch(int index) const {
  const State& s = *state_;
  check(*s.calls,
        s.calls->matmul(s.handle, s.desc, &kOne, s.first.data(), s.first_layout, s.second.data(), s.second_layout, &kZero, s.d.data(),
                        s.d_layout, s.d.data(), s.d_layout, &s.algorithms.at(static_cast<std::size_t>(index)).algorithm, s.workspace.get(),
                        kWorkspaceBytes, s.stream.native()),
        "cublasLtMatmul");
}

std::shared_ptr<const CublasLt> CublasLt::find(std::string& problem) {
  const Library library = Library::open(cuda_library_folders("cublas"), {"libcublasLt.so.13", "libcublasLt.so.12"}, problem);
  if (!library) return nullptr;
  std::shared_ptr<CublasLt> self(new CublasLt);
  const char* missing = nullptr;
#define TILEWAVE_CUBLASLT_LOAD(name, symbol, result, parameters) \
  if (!library.load(self->calls_.name, #symbol)) missing = #symbol;
  TILEWAVE_CUBLASLT_CALLS(TILEWAVE_CUBLASLT_LOAD)
#undef TILEWAVE_CUBLASLT_LOAD
  if (missing != nullptr) {
    problem = tw::format("libcublasLt has no {}", missing);
    return nullptr;
  }
  if (const Status status = self->calls_.create(&self->handle_); status != kSuccess) {
    self->handle_ = nullptr;
    problem = tw::format("cublasLtCreate: {}", self->calls_.status_text(status));
    return nullptr;
  }
  return self;
}

CublasLt::~CublasLt() {
  if (handle_ != nullptr) calls_.destroy(handle_);
}

std::string CublasLt::version() const {
  // 10000 * major + 100 * minor + patch; before 11.0 the factors were others.
  const std::size_t number = calls_.version();
  return tw::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

std::unique_ptr<CublasLtProduct> CublasLt::prepare(const Tensor& a, const Tensor& b, const Tensor& d, const Stream& stream) const {
  auto state = std::make_unique<CublasLtProduct::State>(stream);
  CublasLtProduct::State& s = *state;
  s.calls = &calls_;
  s.handle = handle_;
  s.first = b;
  s.second = a;
  s.d = d;
  const DataType type = data_type(a.dtype());
  const ComputeType compute = a.dtype() == DType::f32 ? ComputeType::f32_fast_tf32 : ComputeType::f32;
  check(calls_, calls_.desc_create(&s.desc, compute, DataType::r_32f), "cublasLtMatmulDescCreate");
  const auto operand = [&](const Tensor& tensor, MatrixLayout& layout, DescAttribute attribute) {
    const ColumnMajor m = transposed(tensor);
    check(calls_, calls_.layout_create(&layout, type, m.rows, m.cols, m.leading), "cublasLtMatrixLayoutCreate");
    check(calls_, calls_.desc_set(s.desc, attribute, &m.operation, sizeof(m.operation)), "cublasLtMatmulDescSetAttribute");
  };
  if (a.dtype() == DType::fp8_e4m3) {
    // As our products: scales of one number each, and sums that stay in the tensor cores.
    s.scale = Tensor::zeros({1}, DType::f32, stream);
    const float one = 1;
    s.scale.copy_from(Tensor::from(std::span(&one, 1), {1}));
    const void* const pointer = s.scale.data();
    const std::int8_t fast = 1;
    check(calls_, calls_.desc_set(s.desc, DescAttribute::a_scale_pointer, &pointer, sizeof(pointer)), "cublasLtMatmulDescSetAttribute");
    check(calls_, calls_.desc_set(s.desc, DescAttribute::b_scale_pointer, &pointer, sizeof(pointer)), "cublasLtMatmulDescSetAttribute");
    check(calls_, calls_.desc_set(s.desc, DescAttribute::fast_accumulation, &fast, sizeof(fast)), "cublasLtMatmulDescSetAttribute");
  }
  operand(b, s.first_layout, DescAttribute::trans_a);
  operand(a, s.second_layout, DescAttribute::trans_b);
  const ColumnMajor out = transposed(d);
  if (out.operation != Operation::none) throw InvalidArgument("cublasLt: d is not row-major");
  check(calls_, calls_.layout_create(&s.d_layout, data_type(d.dtype()), out.rows, out.cols, out.leading), "cublasLtMatrixLayoutCreate");
  s.workspace = allocate(kWorkspaceBytes, stream);

  Preference preference = nullptr;
  check(calls_, calls_.preference_create(&preference), "cublasLtMatmulPreferenceCreate");
  std::vector<HeuristicResult> results(kAlgorithms);
  int found = 0;
  Status status = calls_.preference_set(preference, PreferenceAttribute::max_workspace_bytes, &kWorkspaceBytes, sizeof(kWorkspaceBytes));
  if (status == kSuccess) {
    status = calls_.heuristic(handle_, s.desc, s.first_layout, s.second_layout, s.d_layout, s.d_layout, preference, kAlgorithms,
                              results.data(), &found);
  }
  calls_.preference_destroy(preference);
  check(calls_, status, "cublasLtMatmulAlgoGetHeuristic");
  for (int i = 0; i < found; ++i) {
    if (results[static_cast<std::size_t>(i)].state == kSuccess) s.algorithms.push_back(results[static_cast<std::size_t>(i)]);
  }
  if (s.algorithms.empty()) throw Error("cublasLtMatmulAlgoGetHeuristic: no algorithm");
  return std::unique_ptr<CublasLtProduct>(new CublasLtProduct(std::move(state)));
}

}  // namespace tw::bench
