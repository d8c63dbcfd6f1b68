// The likeliest of 1000 words for each of 300 states: a product whose epilogue of our own, row_argmax.tile.hpp, keeps each tile's largest
// column instead of 300 000 scores. On the CPU and on a GPU, if there is one, against plain loops. Exit code 0 when they agree.
#include <cstdio>
#include <tilewave/gemm_with.hpp>

#include "row_argmax.tile.hpp"

namespace {

constexpr int kStates = 300, kWords = 1000, kWidth = 32;
constexpr int kTiles = (kWords + tw::kGemmWithColumns - 1) / tw::kGemmWithColumns;

double score(const tw::Tensor& states, const tw::Tensor& words, int state, int word) {
  double sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += states.at({state, i}) * words.at({word, i});
  return sum;
}

}  // namespace

int main() {
  const tw::Tensor states = tw::Tensor::random({kStates, kWidth}, tw::DType::bf16, 1);
  const tw::Tensor words = tw::Tensor::random({kWords, kWidth}, tw::DType::bf16, 2);

  const tw::DeviceReport found = tw::find_devices();
  std::printf("%s", found.problems().c_str());
  for (const tw::Device device : found.usable()) {
    const tw::Tensor on_states = states.to(device), on_words = words.to(device);
    const tw::Stream stream = tw::Stream::standard(device);
    const tw::Tensor largest = tw::Tensor::empty({kStates, kTiles}, tw::DType::f32, stream);
    const tw::Tensor column = tw::Tensor::empty({kStates, kTiles}, tw::DType::i32, stream);
    tw::gemm_with<RowArgmax, tw::bf16>(on_states, on_words.transpose(0, 1), [&](auto& bind, auto& params) {
      bind(params.largest, largest);
      bind(params.column, column);
      params.columns = kWords;
    });

    // The largest of a row's tiles. Sums in f32 round, so another word may win, by less than that.
    const tw::Tensor tile_largest = largest.to(tw::Device::cpu()), tile_column = column.to(tw::Device::cpu());
    for (int state = 0; state < kStates; ++state) {
      int best = 0;
      for (int tile = 1; tile < kTiles; ++tile)
        if (tile_largest.at({state, tile}) > tile_largest.at({state, best})) best = tile;
      const int word = static_cast<int>(tile_column.at({state, best}));
      const double won = score(states, words, state, word);
      for (int other = 0; other < kWords; ++other) {
        if (score(states, words, state, other) <= won + 1e-4) continue;
        std::printf("%s: state %d: word %d instead of %d\n", device.name().c_str(), state, word, other);
        return 1;
      }
    }
    std::printf("%s: the likeliest words of %d states\n", device.name().c_str(), kStates);
  }
}
