#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::log_mel {

/// The radices of a transform whose length is their product. Its steps work in place.
template <int... kRadices>
struct Radices {
  static constexpr int length = (kRadices * ...);
  /// The index at which the steps leave element k of the result: its digits in reverse order.
  TW_INLINE static constexpr int place(int k) {
    int left = length, at = 0;
    ((left /= kRadices, at += k % kRadices * left, k /= kRadices), ...);
    return at;
  }
};

/// log10 of the mel bins of kFrames frames of a window, and the largest of each frame. A frame's n_fft real samples are transformed as
/// n_fft / 2 complex numbers, x[2 n] + i x[2 n + 1]. Frames are columns of a Buffer, so that the threads of a warp are at the same step of
/// 32 transforms: all read the same root, and neighbouring elements.
template <class Radices>
struct Frames;

template <int... kRadices>
struct Frames<Radices<kRadices...>> {
  static constexpr const char* source = "kernels/log_mel/log_mel.tile.hpp";
  using Order = Radices<kRadices...>;
  static constexpr int half = Order::length, n_fft = 2 * half;
  static constexpr int frames = 32;

  template <class Target>
  struct On {
    static constexpr int warps = 16;
    static constexpr int min_blocks = 2;
    using Mel = Rows<Target, float, frames, 128, warps, 4>;
    struct Params {
      Pointer<Target, const float> samples;
      i64 sample_stride;  ///< from one window to the next
      int sample_count;   ///< of a window; zeros follow up to `window`
      int window, hop;
      Pointer<Target, const float> roots;    ///< [n_fft, 2]: cos(2 pi n / n_fft), -sin(2 pi n / n_fft)
      Pointer<Target, const float> hann;     ///< [n_fft]
      Pointer<Target, const i32> first;      ///< [bins]: the first power that a filter weighs
      Pointer<Target, const float> weights;  ///< [taps, bins]
      int taps, bins;
      Global<Target, float, Mel> features;  ///< [windows, frames, bins]
      Global<Target, float> largest;        ///< [windows, frames, 1]
    };
    struct Memory {
      Buffer<Target, float, half, 2 * frames> spectra;  ///< real parts, then imaginary parts of all frames
      explicit constexpr Memory(auto& block) : spectra(block) {}
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      load_frames(block, p, t, memory.spectra);
      transform<1, kRadices...>(block, p, memory.spectra);
      find_powers(block, p, memory.spectra);
      RowVector<Target, float, Mel> largest;
      block.fill(largest, -kInfinity);
      for (int col0 = 0; col0 < p.bins; col0 += Mel::cols) {
        Mel mel;
        block.fill(mel, 0.0f);
        block.for_each(mel, [&](int row, int col, auto& x) {
          const int bin = min(col0 + col, p.bins - 1);  // columns after the last bin repeat it
          const int first = p.first[bin];
          TW_NO_UNROLL
          for (int n = 0; n < p.taps; ++n) x += p.weights[n * p.bins + bin] * power(memory.spectra, first + n, row);
          x = log2(max_or_nan(x, 1e-10f)) * 0.301029995663981195f;
        });
        block.rows(mel, [&](int i, auto row) { largest[i] = max(largest[i], row.max()); });
        block.store(mel, p.features, t.m * frames, col0, t.batch);
      }
      block.store(largest, p.largest, t.m * frames, 0, t.batch);
    }

    /// The frames' samples, mirrored at the window's ends, times the Hann window.
    TW_INLINE static void load_frames(auto& block, const Params& p, Tile t, const auto& spectra) {
      const auto samples = p.samples + t.batch * p.sample_stride;
      block.update(spectra, n_fft * frames, [&](int i) {
        const int frame = i / n_fft, n = i - frame * n_fft;
        int at = (t.m * frames + frame) * p.hop + n - half;
        at = at < 0 ? -at : at;
        at = at < p.window ? at : 2 * (p.window - 1) - at;
        const bool inside = at >= 0 && at < p.sample_count;  // frames after the last one may be anywhere
        auto& x = spectra.at(n / 2, n % 2 * frames + frame);
        if (inside)
          x = samples[at] * p.hann[n];
        else
          x = 0.0f;
      });
    }

    /// The steps of a transform in place, decimated in frequency: `kGroups` transforms are left to be done, which are neighbours.
    template <int kGroups, int kRadix, int... kRest>
    TW_INLINE static void transform(auto& block, const Params& p, const auto& spectra) {
      constexpr int stride = half / kGroups / kRadix;
      block.update(spectra, half / kRadix * frames, [&](int i) {
        const int frame = i % frames, butterfly = i / frames, n = butterfly % stride;
        const int first = butterfly / stride * kRadix * stride + n;
        using Number = decltype(spectra.at(0, 0) + 0.0f);  // float, or one that counts its operations
        Number re[kRadix], im[kRadix], cosine[kRadix], sine[kRadix];
        TW_UNROLL
        for (int j = 0; j < kRadix; ++j) {
          re[j] = spectra.at(first + j * stride, frame);
          im[j] = spectra.at(first + j * stride, frames + frame);
          cosine[j] = p.roots[2 * (n_fft / kRadix * j)];
          sine[j] = p.roots[2 * (n_fft / kRadix * j) + 1];
        }
        TW_UNROLL
        for (int k = 0; k < kRadix; ++k) {
          auto x = re[0], y = im[0];
          TW_UNROLL
          for (int j = 1; j < kRadix; ++j) {
            const auto c = cosine[j * k % kRadix], s = sine[j * k % kRadix];
            x += re[j] * c - im[j] * s;
            y += re[j] * s + im[j] * c;
          }
          const int turn = 2 * kGroups * n * k;
          const Number c = p.roots[2 * turn], s = p.roots[2 * turn + 1];
          spectra.at(first + k * stride, frame) = x * c - y * s;
          spectra.at(first + k * stride, frames + frame) = x * s + y * c;
        }
      });
      if constexpr (sizeof...(kRest) > 0) transform<kGroups * kRadix, kRest...>(block, p, spectra);
    }

    /// Powers replace the real parts: with E and O the transforms of the even and odd samples, the result is E + i O, and the frame's
    /// transform E + w^k O. The last power has its place among the imaginary parts.
    TW_INLINE static void find_powers(auto& block, const Params& p, const auto& spectra) {
      block.update(spectra, (half / 2 + 1) * frames, [&](int i) {
        const int frame = i % frames, k = i / frames;
        using Number = decltype(spectra.at(0, 0) + 0.0f);
        const int a = Order::place(k), b = k == 0 ? a : Order::place(half - k);
        const Number a_re = spectra.at(a, frame), a_im = spectra.at(a, frames + frame);
        const Number b_re = spectra.at(b, frame), b_im = spectra.at(b, frames + frame);
        const Number c = p.roots[2 * k], s = p.roots[2 * k + 1];
        const auto even_re = a_re + b_re, even_im = a_im - b_im;
        const auto odd_re = a_im + b_im, odd_im = b_re - a_re;
        const auto turned_re = odd_re * c - odd_im * s, turned_im = odd_re * s + odd_im * c;
        const auto re = even_re + turned_re, im = even_im + turned_im;
        const auto mirrored_re = even_re - turned_re, mirrored_im = even_im - turned_im;
        spectra.at(a, frame) = (re * re + im * im) * 0.25f;
        spectra.at(b, k == 0 ? frames + frame : frame) = (mirrored_re * mirrored_re + mirrored_im * mirrored_im) * 0.25f;
      });
    }
    TW_INLINE static auto power(const auto& spectra, int k, int frame) {
      return spectra.at(k < half ? Order::place(k) : 0, k < half ? frame : frames + frame) + 0.0f;
    }
  };
};

/// x = (max(x, M - 8) + 4) / 4 for all elements of a window, M its largest.
struct Scale {
  static constexpr const char* source = "kernels/log_mel/log_mel.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int warps = 8;
    using Values = Rows<Target, float, 1, 4096, warps, 4>;
    struct Params {
      Global<Target, const float, Values> largest;  ///< [windows, frames]: of every frame
      Global<Target, const float, Values> mel;      ///< [windows, frames * bins]
      Global<Target, float, Values> features;       ///< the same memory
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Values x;
      RowVector<Target, float, Values> floor;
      block.fill(floor, -kInfinity);
      for (int col = 0; col < p.largest.cols; col += Values::cols) {
        block.load(x, p.largest, t.batch, col, 0, 0, Fill{-kInfinity});
        block.rows(x, [&](int i, auto row) { floor[i] = max(floor[i], row.max() - 8.0f); });
      }
      block.load(x, p.mel, t.batch, t.m * Values::cols);
      block.map(x, floor, [](auto mel, auto smallest) { return (max_or_nan(mel, smallest) + 4.0f) * 0.25f; });
      block.store(x, p.features, t.batch, t.m * Values::cols);
    }
  };
};

}  // namespace tw::kernels::log_mel
