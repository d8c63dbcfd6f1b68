#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <numbers>
#include <vector>

namespace tw::speech {

/// The constants of a discrete Fourier transform of real signals. It is done as a transform of half their length, on complex numbers, whose
/// steps have radix 4, 2 and the odd prime factors.
struct FftPlan {
  struct Root {
    double re, im;
  };
  int half;                 ///< half of the signals' length
  std::vector<Root> roots;  ///< exp(-2 pi i n / length)
  std::vector<int> radices;

  /// `length`: even, at least 4.
  explicit FftPlan(int length) : half(length / 2), roots(static_cast<std::size_t>(length)) {
    for (int n = 0; n < length; ++n) {
      const double angle = -2 * std::numbers::pi * n / length;
      roots[n] = {std::cos(angle), std::sin(angle)};
    }
    int rest = half;
    const auto take = [&](int radix) {
      while (rest % radix == 0) {
        radices.push_back(radix);
        rest /= radix;
      }
      return rest;
    };
    take(4);
    int radix = 2;
    while (take(radix) > 1) radix += radix == 2 ? 1 : 2;
  }
};

/// Numbers of 2 or 4 signals that are processed together. Functions take them by reference, because how they are passed by value depends on
/// the instruction set.
struct TwoLanes {
  static constexpr int count = 2;
  using Numbers = double __attribute__((vector_size(16)));
  using Bits = std::uint64_t __attribute__((vector_size(16)));
};
struct FourLanes {
  static constexpr int count = 4;
  using Numbers = double __attribute__((vector_size(32)));
  using Bits = std::uint64_t __attribute__((vector_size(32)));
};

/// Power spectra of several signals at once, by Stockham's algorithm; the time grows with length * (sum of the radices). Everything is
/// inline, so that callers choose the instruction set. Each thread has its own.
template <class Lanes>
class PowerSpectra {
 public:
  using Numbers = typename Lanes::Numbers;
  struct alignas(sizeof(Numbers)) Complex {
    Numbers re, im;
  };
  using Root = FftPlan::Root;

  explicit PowerSpectra(const FftPlan& plan)
      : plan_(plan),
        x_(static_cast<std::size_t>(plan.half + 1)),
        y_(x_.size()),
        butterfly_(static_cast<std::size_t>(*std::max_element(plan.radices.begin(), plan.radices.end()))) {}

  /// To be set before run(): element 2 n of each signal in signals()[n].re, element 2 n + 1 in signals()[n].im.
  Complex* signals() { return x_.data(); }

  /// |sum_n signal[n] exp(-2 pi i n k / length)|^2 in .re of element k of the result, for k from 0 to length / 2.
  const Complex* run() {
    transform();
    const Complex* const z = x_.data();
    Complex* const power = y_.data();
    // With E and O the transforms of the even and odd elements, z = E + i O; the signals' is E + w^k O.
    for (int k = 0; k <= plan_.half / 2; ++k) {
      const Complex &a = z[k], &b = z[k == 0 ? 0 : plan_.half - k];
      const Root w = plan_.roots[k];
      const Numbers even_re = a.re + b.re, even_im = a.im - b.im;
      const Numbers odd_re = a.im + b.im, odd_im = b.re - a.re;
      const Numbers turned_re = odd_re * w.re - odd_im * w.im, turned_im = odd_re * w.im + odd_im * w.re;
      const Numbers re = even_re + turned_re, im = even_im + turned_im;
      const Numbers mirrored_re = even_re - turned_re, mirrored_im = even_im - turned_im;
      power[k].re = (re * re + im * im) / 4;
      power[plan_.half - k].re = (mirrored_re * mirrored_re + mirrored_im * mirrored_im) / 4;
    }
    return power;
  }

 private:
  const FftPlan& plan_;
  std::vector<Complex> x_, y_, butterfly_;

  /// The complex transform of x_; y_ is overwritten.
  void transform() {
    int left = plan_.half, stride = 1;  // transforms of length `left`, `stride` of them interleaved, are still to be done
    for (const int radix : plan_.radices) {
      left /= radix;
      switch (radix) {
        case 2:
          step<2>(radix, left, stride);
          break;
        case 3:
          step<3>(radix, left, stride);
          break;
        case 4:
          step<4>(radix, left, stride);
          break;
        case 5:
          step<5>(radix, left, stride);
          break;
        default:
          step<0>(radix, left, stride);
      }
      stride *= radix;
      x_.swap(y_);
    }
  }

  /// From x_ to y_. kRadix: `radix`, if the loops are to be unrolled for it, else 0.
  template <int kRadix>
  void step(int radix, int left, int stride) {
    const Complex* const x = x_.data();
    Complex unrolled[kRadix == 0 ? 1 : kRadix];
    Complex* const a = kRadix == 0 ? butterfly_.data() : unrolled;
    if constexpr (kRadix != 0) radix = kRadix;
    for (int p = 0; p < left; ++p) {
      for (int q = 0; q < stride; ++q) {
        for (int j = 0; j < radix; ++j) a[j] = x[q + stride * (p + left * j)];
        Complex* const to = y_.data() + q + stride * radix * p;
        // Stores result k of the butterfly, times exp(-2 pi i p k stride / half).
        const auto put = [&](int k, const Complex& value) {
          const Root w = plan_.roots[2 * static_cast<std::ptrdiff_t>(stride) * p * k];
          to[stride * k] = {value.re * w.re - value.im * w.im, value.re * w.im + value.im * w.re};
        };
        if constexpr (kRadix == 2) {
          put(0, {a[0].re + a[1].re, a[0].im + a[1].im});
          put(1, {a[0].re - a[1].re, a[0].im - a[1].im});
        } else if constexpr (kRadix == 4) {
          const Complex s = {a[0].re + a[2].re, a[0].im + a[2].im}, d = {a[0].re - a[2].re, a[0].im - a[2].im};
          const Complex t = {a[1].re + a[3].re, a[1].im + a[3].im}, e = {a[1].re - a[3].re, a[1].im - a[3].im};
          put(0, {s.re + t.re, s.im + t.im});
          put(1, {d.re + e.im, d.im - e.re});
          put(2, {s.re - t.re, s.im - t.im});
          put(3, {d.re - e.im, d.im + e.re});
        } else {
          odd_butterfly(a, radix, put);
        }
      }
    }
  }

  /// The transform of `radix` numbers, an odd prime: numbers j and radix - j share their products with cosines and sines.
  template <class Put>
  void odd_butterfly(Complex* a, int radix, const Put& put) const {
    Complex sum = a[0];
    for (int j = 1; j <= radix / 2; ++j) {
      const Complex first = a[j], last = a[radix - j];
      a[j] = {first.re + last.re, first.im + last.im};
      a[radix - j] = {first.re - last.re, first.im - last.im};
      sum = {sum.re + a[j].re, sum.im + a[j].im};
    }
    put(0, sum);
    const int turn = 2 * plan_.half / radix;
    for (int k = 1; k <= radix / 2; ++k) {
      Complex cosines = a[0], sines = {};
      for (int j = 1, turns = k; j <= radix / 2; ++j, turns = (turns + k) % radix) {
        const Root w = plan_.roots[turns * turn];
        cosines = {cosines.re + a[j].re * w.re, cosines.im + a[j].im * w.re};
        sines = {sines.re + a[radix - j].re * w.im, sines.im + a[radix - j].im * w.im};
      }
      put(k, {cosines.re - sines.im, cosines.im + sines.re});
      put(radix - k, {cosines.re + sines.im, cosines.im - sines.re});
    }
  }
};

}  // namespace tw::speech
