#include "tilewave/layout.hpp"

#include <utility>

#include "runtime/format.hpp"

namespace tw {

namespace detail {

namespace {
thread_local TileRecorder* current = nullptr;
}  // namespace

TileRecorder::TileRecorder() { current = this; }
TileRecorder::~TileRecorder() { current = nullptr; }

void TileRecorder::add(const TileLayout& layout) { current->tiles.push_back({layout, current->where_}); }
void TileRecorder::enter_ring(int slots) { where_ = tw::format("ring {}, {} slot{}", ++rings_, slots, slots == 1 ? "" : "s"); }
void TileRecorder::enter_staging(int slots) { where_ = tw::format("staging, {} slots for each warpgroup", slots); }
void TileRecorder::enter(const char* where) { where_ = where; }

}  // namespace detail

std::vector<KernelTile> tiles_of(const KernelSpec& spec) {
  detail::TileRecorder recorder;
  if (spec.record_tiles != nullptr) spec.record_tiles(recorder);
  return std::move(recorder.tiles);
}

}  // namespace tw
