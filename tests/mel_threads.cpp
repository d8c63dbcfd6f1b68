// Log-mel from several threads at once, under ThreadSanitizer: mel.cpp is compiled with it for this program, the library is not. What the
// threads share is what they compute with; results stay until all are done, so that no memory goes from one thread to another.

#include <cstdio>
#include <thread>
#include <vector>

#include "speech/mel/mel.hpp"
#include "tilewave/device.hpp"

int main() {
  tw::set_cpu_threads(1);  // the pool is not compiled with the sanitizer
  std::vector<float> samples(16000);
  for (std::size_t i = 0; i < samples.size(); ++i) samples[i] = static_cast<float>(i * i % 1009) / 1009 - 0.5F;
  // Half of these has a prime factor of 7 or more: the transform needs a buffer.
  for (const int n_fft : {402, 1022}) {
    const tw::speech::LogMel log_mel({.n_fft = n_fft, .window_seconds = 1});
    const tw::Tensor expected = log_mel.extract(samples).features;
    std::vector<tw::Tensor> results(4);
    std::vector<std::thread> threads;
    for (tw::Tensor& result : results) threads.emplace_back([&] { result = log_mel.extract(samples).features; });
    for (std::thread& thread : threads) thread.join();
    for (const tw::Tensor& result : results) {
      if (tw::max_difference(result, expected) == 0) continue;
      std::printf("n_fft %d: threads differ by %g\n", n_fft, tw::max_difference(result, expected));
      return 1;
    }
  }
}
