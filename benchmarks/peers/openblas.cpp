#include "benchmarks/peers/openblas.hpp"

#include "benchmarks/peers/library.hpp"

namespace tw::bench {
namespace {

constexpr int kRowMajor = 101;  // CblasRowMajor
constexpr int kNoTrans = 111;   // CblasNoTrans
constexpr int kTrans = 112;     // CblasTrans

struct Operand {
  const float* data;
  int trans;
  int leading;
};

Operand operand(const Tensor& t) {
  const bool row_major = t.stride(1) == 1;
  return {t.data<float>(), row_major ? kNoTrans : kTrans, static_cast<int>(t.stride(row_major ? 0 : 1))};
}

}  // namespace

bool OpenBlas::open(std::string& problem, int threads) {
  const Library library = Library::open({""}, {"libopenblas.so.0", "libopenblas.so"}, problem);
  if (!library) return false;
  if (!library.load(sgemm_, "cblas_sgemm") || !library.load(set_threads_, "openblas_set_num_threads") ||
      !library.load(config_, "openblas_get_config")) {
    problem = "libopenblas has no cblas_sgemm, openblas_set_num_threads or openblas_get_config";
    return false;
  }
  set_threads_(threads);
  return true;
}

std::string OpenBlas::version() const { return config_(); }

void OpenBlas::sgemm(const Tensor& a, const Tensor& b, const Tensor& d) const {
  const Operand first = operand(a);
  const Operand second = operand(b);
  sgemm_(kRowMajor, first.trans, second.trans, static_cast<int>(d.shape(0)), static_cast<int>(d.shape(1)), static_cast<int>(a.shape(1)),
         1.0f, first.data, first.leading, second.data, second.leading, 0.0f, d.data<float>(), static_cast<int>(d.stride(0)));
}

}  // namespace tw::bench
