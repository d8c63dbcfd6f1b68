#include "tilewave/analyze.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "runtime/format.hpp"

namespace tw {

namespace analysis {

void schedule_error(const char* what) { throw Error(std::string("the kernel's schedule is wrong: ") + what); }

namespace {

struct Touch {
  const void* array;
  int place;  ///< index of a bound tensor, or -1
  bool write;
  int bytes;
  i64 index;
  int row, col;
};

/// An array that element functions index, and the range of indices seen so far.
struct Seen {
  int place;
  u64 bytes;  ///< per element
  i64 lowest, highest;
};

/// The arrays that element functions index in this thread's analysis.
struct Walk {
  int depth = 0;  ///< of nested walks
  int row = 0, col = 0;
  std::vector<Touch> touches;
  std::map<const void*, Seen> arrays;
  int places = 0;

  Seen& seen(const Touch& touch) {
    const auto [entry, added] = arrays.try_emplace(touch.array);
    if (added) {
      entry->second = {std::min(places, kArrays - 1), static_cast<u64>(touch.bytes), touch.index, touch.index};
      ++places;
    }
    return entry->second;
  }
  /// `count` elements from `lowest` to `highest`.
  void add(const Touch& touch, u64 count, i64 lowest, i64 highest) {
    int place = touch.place;
    if (place < 0) {
      Seen& array = seen(touch);
      array.lowest = std::min(array.lowest, lowest);
      array.highest = std::max(array.highest, highest);
      place = array.place;
    }
    (touch.write ? tally.written : tally.read)[place] += count * static_cast<u64>(touch.bytes);
  }
};

thread_local Walk walk;

}  // namespace

void begin_walk() {
  if (walk.depth++ == 0) walk.touches.clear();
}

void at_element(int row, int col) {
  walk.row = row;
  walk.col = col;
}

void touch(const void* array, int place, i64 index, int bytes, bool write) {
  const Touch touch{array, place, write, bytes, index, walk.row, walk.col};
  if (walk.depth > 0)
    walk.touches.push_back(touch);
  else
    walk.add(touch, 1, index, index);
}

bool touched() { return !walk.touches.empty(); }

void end_walk() {
  if (--walk.depth > 0 || walk.touches.empty()) return;
  // An element whose index does not change from row to row is loaded once for all rows; the same holds for columns. Items of parallel()
  // have one column, and each may access several indices.
  struct Indices {
    Touch touch;
    std::set<i64> of_rows, of_cols;
    bool one_column = true;
  };
  std::map<std::tuple<const void*, int, bool>, Indices> arrays;
  for (const Touch& touch : walk.touches) {
    Indices& indices = arrays.try_emplace({touch.array, touch.place, touch.write}, Indices{touch, {}, {}}).first->second;
    if (touch.col == 0) indices.of_rows.insert(touch.index);
    indices.one_column = indices.one_column && touch.col == 0;
    if (touch.row == 0) indices.of_cols.insert(touch.index);
  }
  for (const auto& [key, indices] : arrays) {
    const auto& [touch, of_rows, of_cols, one_column] = indices;
    if (one_column) {
      walk.add(touch, of_rows.size(), *of_rows.begin(), *of_rows.rbegin());
      continue;
    }
    const u64 count = std::max<u64>(of_rows.size(), 1) * std::max<u64>(of_cols.size(), 1);
    const std::set<i64>& rows = of_rows.empty() ? of_cols : of_rows;
    const std::set<i64>& cols = of_cols.empty() ? of_rows : of_cols;
    const i64 lowest = std::min(*rows.begin(), *cols.begin());
    walk.add(touch, count, lowest, *rows.rbegin() + *cols.rbegin() - lowest);
  }
}

}  // namespace analysis

const char* name_of(OperandType operands) {
  constexpr const char* names[] = {"f32", "f16", "bf16", "fp8", "i8"};
  return names[static_cast<std::size_t>(operands)];
}

std::uint64_t Operations::all_products() const {
  std::uint64_t sum = 0;
  for (const std::uint64_t count : products) sum += count;
  return sum;
}

Tensor placeholder(Shape shape, DType dtype) {
  alignas(std::max_align_t) char nothing = 0;  // checks the shape
  const std::int64_t elements = Tensor::borrow(&nothing, shape, dtype, Device::cpu()).numel();
  if (elements == 0) return Tensor::empty(std::move(shape), dtype);
  const std::size_t bytes = static_cast<std::size_t>(elements) * size_of(dtype);
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw InvalidArgument(tw::format("placeholder: {} bytes do not fit into the address space", bytes));
  std::shared_ptr<void> owner(data, [bytes](void* p) { munmap(p, bytes); });
  return Tensor::borrow(data, std::move(shape), dtype, Device::cpu(), {}, std::move(owner));
}

namespace {

// Vendors' data sheets: dense rates. H200: "NVIDIA H200 Tensor Core GPU" data sheet (its rates with sparsity, halved). A100: "NVIDIA A100
// 80GB" data sheet, SXM. RTX 4090: "NVIDIA Ada GPU architecture" white paper, appendix A; tensor cores with f32 accumulation. Special
// functions are 16 per SM and clock (CUDA C++ Programming Guide, arithmetic instructions), at the boost clock of the f32 rate.
// Shared memory: the same guide's table of technical specifications.
const std::vector<DeviceModel> kModels{
    {"NVIDIA H200", "data sheet, SXM", 132, 4.8e12, {494.7e12, 989.5e12, 989.5e12, 1979e12, 1979e12}, 66.9e12, 16 * 132 * 1.98e9, 232448},
    {"NVIDIA A100", "data sheet, SXM 80 GB", 108, 2.039e12, {156e12, 312e12, 312e12, 0, 624e12}, 19.5e12, 16 * 108 * 1.41e9, 166912},
    {"NVIDIA RTX 4090",
     "Ada white paper",
     128,
     1.008e12,
     {82.6e12, 165.2e12, 165.2e12, 330.3e12, 660.6e12},
     82.6e12,
     16 * 128 * 2.52e9,
     101376},
};

}  // namespace

const std::vector<DeviceModel>& device_models() { return kModels; }

const DeviceModel* find_device_model(std::string_view name) {
  for (const DeviceModel& model : kModels)
    if (name.find(model.name.substr(model.name.rfind(' ') + 1)) != std::string_view::npos) return &model;
  return nullptr;
}

DeviceModel cpu_model(std::string name, int threads, double flops, double bytes) {
  const double all = flops * threads;
  DeviceModel model{std::move(name), "measured", threads, bytes, {}, all, all / 20, 0};
  model.products.fill(all);
  model.skips_padding = true;
  return model;
}

Roofline roofline(const Analysis& a, const DeviceModel& device) {
  const double units = device.units;
  // If tiles are equal, the busiest SM has a whole number of them. If not, it has at least an even share, and at least the largest tile.
  const auto seconds = [&](std::uint64_t all, std::uint64_t largest, double rate) {
    if (all == 0) return 0.0;
    const double tiles = static_cast<double>(a.tiles);
    const bool equal = static_cast<double>(largest) * tiles <= static_cast<double>(all);
    const double busiest = equal ? static_cast<double>(largest) * std::ceil(tiles / units)
                                 : std::max(static_cast<double>(all) / units, static_cast<double>(largest));
    return busiest * units / rate;
  };
  Roofline r;
  r.memory = static_cast<double>(a.unique_read + a.unique_written) / device.memory_bytes;
  for (std::size_t i = 0; i < a.operations.products.size(); ++i) {
    const auto count = [&](const Operations& operations) { return (device.skips_padding ? operations.inside : operations.products)[i]; };
    if (count(a.operations) == 0) continue;
    if (device.products[i] == 0)
      throw InvalidArgument(tw::format("roofline: {} has no products of {}", device.name, name_of(static_cast<OperandType>(i))));
    r.products += seconds(count(a.operations), count(a.largest_tile), device.products[i]);
  }
  r.f32 = seconds(a.operations.f32, a.largest_tile.f32, device.f32);
  r.special = seconds(a.operations.special, a.largest_tile.special, device.special);
  r.seconds = r.memory;
  const auto consider = [&](double time, const char* name) {
    if (time > r.seconds) {
      r.seconds = time;
      r.bound = name;
    }
  };
  consider(r.products, "products");
  consider(r.f32, "f32");
  consider(r.special, "special functions");
  return r;
}

namespace detail {

int AnalysisBinder::add(const Tensor& tensor) {
  std::uint64_t bytes = tensor.numel() == 0 ? 0 : size_of(tensor.dtype());
  for (int dim = 0; dim < tensor.rank(); ++dim)
    if (tensor.stride(dim) != 0) bytes *= static_cast<std::uint64_t>(tensor.shape(dim));
  arrays_.push_back({tensor.data(), bytes});
  return static_cast<int>(std::min<std::size_t>(arrays_.size(), analysis::kArrays)) - 1;
}

namespace {

/// Up to this number, all tiles are run.
constexpr int kAllTiles = 2048;
/// Above it, this many are run to check that tiles assumed to be equal are equal.
constexpr int kProbes = 256;

using analysis::Tally;

bool same(const Tally& a, const Tally& b) { return std::memcmp(&a, &b, sizeof(Tally)) == 0; }

/// Runs single tiles and adds up their counts.
class Counter {
 public:
  Counter(const AnalysisKernel& kernel, const void* params)
      : kernel_(kernel),
        params_(params),
        arena_(static_cast<std::size_t>(kernel.shared_bytes) == 0 ? nullptr : new u8[static_cast<std::size_t>(kernel.shared_bytes)]) {}

  Tally count(Tile tile) const {
    analysis::tally = {};
    analysis::cost = {};
    kernel_.run(params_, tile, arena_.get());
    analysis::tally.cost = analysis::cost;
    return analysis::tally;
  }
  void add(const Tally& tile, std::uint64_t times) {
    const auto sum = [&](u64& to, u64 x) { to += x * times; };
    for (int i = 0; i < analysis::kArrays; ++i) {
      sum(total.read[i], tile.read[i]);
      sum(total.written[i], tile.written[i]);
    }
    sum(total.shared, tile.shared);
    for (std::size_t i = 0; i < std::size(total.products); ++i) {
      sum(total.products[i], tile.products[i]);
      sum(total.inside[i], tile.inside[i]);
      largest.products[i] = std::max(largest.products[i], std::uint64_t{tile.products[i]});
      largest.inside[i] = std::max(largest.inside[i], std::uint64_t{tile.inside[i]});
    }
    total.cost += tile.cost * times;
    largest.f32 = std::max(largest.f32, std::uint64_t{tile.cost.f32});
    largest.special = std::max(largest.special, std::uint64_t{tile.cost.special});
  }

  Tally total{};
  Operations largest;

 private:
  const AnalysisKernel& kernel_;
  const void* params_;
  std::unique_ptr<u8[]> arena_;
};

/// Assigns a number to each coordinate 0, 1, ...: tiles with equal counts have the same number.
template <class MakeTile>
std::vector<int> classes(const Counter& counter, int extent, MakeTile tile) {
  std::vector<int> result;
  std::vector<Tally> known;
  for (int i = 0; i < extent; ++i) {
    const Tally counted = counter.count(tile(i));
    const auto found = std::find_if(known.rbegin(), known.rend(), [&](const Tally& t) { return same(t, counted); });
    result.push_back(static_cast<int>(known.rend() - found) - 1);
    if (found == known.rend()) {
      result.back() = static_cast<int>(known.size());
      known.push_back(counted);
    }
  }
  return result;
}

/// Computes the sum over all tiles from one tile of each kind. False if that is not possible.
bool count_classes(Counter& counter, const AnalysisKernel& kernel, const TileGrid& grid, int tiles) {
  Tile extent{0, 0, 0};
  for (int i = 0; i < tiles; ++i) {
    const Tile tile = kernel.at(grid, i);
    extent = {std::max(extent.m, tile.m + 1), std::max(extent.n, tile.n + 1), std::max(extent.batch, tile.batch + 1)};
  }
  const std::vector<int> of_m = classes(counter, extent.m, [](int i) { return Tile{i, 0, 0}; });
  const std::vector<int> of_n = classes(counter, extent.n, [](int i) { return Tile{0, i, 0}; });
  const std::vector<int> of_batch = classes(counter, extent.batch, [](int i) { return Tile{0, 0, i}; });
  static_cast<void>(counter.count({extent.m - 1, extent.n - 1, extent.batch - 1}));  // the last elements that functions index
  const auto class_of = [&](Tile t) {
    return std::tuple{of_m[static_cast<std::size_t>(t.m)], of_n[static_cast<std::size_t>(t.n)],
                      of_batch[static_cast<std::size_t>(t.batch)]};
  };
  struct Class {
    Tally tally;
    std::uint64_t tiles = 0;
  };
  std::map<std::tuple<int, int, int>, Class> found;
  for (int i = 0; i < tiles; ++i) {
    const Tile tile = kernel.at(grid, i);
    Class& c = found[class_of(tile)];
    if (c.tiles++ == 0) c.tally = counter.count(tile);
  }
  std::mt19937 random(1);
  for (int probe = 0; probe < kProbes; ++probe) {
    const Tile tile = kernel.at(grid, std::uniform_int_distribution<int>(0, tiles - 1)(random));
    if (!same(found[class_of(tile)].tally, counter.count(tile))) return false;
  }
  for (const auto& [key, c] : found) counter.add(c.tally, c.tiles);
  return true;
}

}  // namespace

Analysis analyze_tiles(const AnalysisKernel& kernel, const void* params, const TileGrid& grid, const std::vector<AnalysedArray>& arrays) {
  analysis::walk.arrays.clear();
  analysis::walk.depth = 0;  // an earlier analysis may have thrown
  analysis::walk.places = static_cast<int>(arrays.size());
  analysis::unread_stores = {};
  Counter counter(kernel, params);
  const int tiles = grid.count();
  if (tiles <= kAllTiles || !count_classes(counter, kernel, grid, tiles))
    for (int i = 0; i < tiles; ++i) counter.add(counter.count(kernel.at(grid, i)), 1);

  Analysis a;
  a.tiles = tiles;
  a.threads = kernel.threads;
  a.shared_bytes = kernel.shared_bytes;
  std::uint64_t sizes[analysis::kArrays] = {};
  for (std::size_t i = 0; i < arrays.size(); ++i) sizes[std::min<std::size_t>(i, analysis::kArrays - 1)] += arrays[i].bytes;
  for (const auto& [data, array] : analysis::walk.arrays)
    sizes[array.place] += static_cast<std::uint64_t>(array.highest - array.lowest + 1) * array.bytes;
  for (int i = 0; i < analysis::kArrays; ++i) {
    a.global_read += counter.total.read[i];
    a.global_written += counter.total.written[i];
    a.unique_read += std::min<std::uint64_t>(counter.total.read[i], sizes[i]);
    a.unique_written += std::min<std::uint64_t>(counter.total.written[i], sizes[i]);
  }
  a.shared_traffic = counter.total.shared + counter.total.cost.shared;
  std::copy(std::begin(counter.total.products), std::end(counter.total.products), a.operations.products.begin());
  std::copy(std::begin(counter.total.inside), std::end(counter.total.inside), a.operations.inside.begin());
  a.operations.f32 = counter.total.cost.f32;
  a.operations.special = counter.total.cost.special;
  a.largest_tile = counter.largest;
  a.uncounted = counter.total.cost.uncounted;
  return a;
}

}  // namespace detail
}  // namespace tw
