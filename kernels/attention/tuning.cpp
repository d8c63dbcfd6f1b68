#include <algorithm>
#include <cmath>

#include "kernels/attention/call.hpp"
#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/variants.hpp"
#include "kernels/product_tiles.hpp"

namespace tw::kernels::attention {

namespace {

constexpr int kPartKeys = 128;
constexpr int kTileRows = 64;  ///< of decoding

std::vector<int> values_of(const AttentionConfig& c) {
  return {c.rows, c.keys, c.stages, c.min_blocks, c.lag, c.queries_in_registers, c.maxima_first};
}

/// `like` with the values of a point.
AttentionConfig with_values(AttentionConfig like, const std::vector<int>& values, const RuleTraits& rules) {
  like.rows = values[0], like.keys = values[1], like.stages = values[2], like.min_blocks = values[3], like.lag = values[4];
  like.queries_in_registers = values[5] != 0;
  like.maxima_first = values[6] != 0;
  like.rules_in_halves = !like.maxima_first && rules.changing;
  return like;
}

/// Registers of a thread for accumulators, weights and queries against what its warpgroups leave it; queries, keys, values and the output's
/// staging against shared memory.
bool fits(const AttentionConfig& c) {
  constexpr int kRegisters[] = {240, 240, 160, 112}, kPairedRegisters = 108, kOverhead = 28;
  constexpr int kSharedPerSm = 233472, kReserved = 1024, kBarriers = 1024;
  if (c.rows % 64 != 0 || c.rows < 64 || c.rows > 256 || (c.min_blocks == 2 && c.rows != 128)) return false;
  const int registers = c.min_blocks == 2 ? kPairedRegisters : kRegisters[c.rows / 64 - 1];
  const int used = c.keys / 2 + c.keys / 4 + c.value_dim / 2 + (c.queries_in_registers ? c.head_dim / 4 : 0);
  if (used + kOverhead > registers) return false;
  const auto padded = [](int dim) { return (dim + 63) / 64 * 64; };
  const int d = padded(c.head_dim), dv = padded(c.value_dim);
  const int bytes = kBarriers + 2 * (c.rows * d + c.stages * c.keys * (d + dv)) + c.rows / 64 * 2 * 64 * kStepBytes;
  return bytes <= std::min(kSharedBytesPerBlock, kSharedPerSm / c.min_blocks - kReserved);
}

/// Keys that a query sees, on average.
double seen_keys(const AttentionCall& call) {
  const double rows = static_cast<double>(call.q.shape(2)), keys = call.keys;
  const double seen = call.upper ? keys - std::min(rows, keys) / 2 : keys;
  const double in_chunk = call.chunk > 0 ? std::min(seen, static_cast<double>(call.chunk)) : seen;
  return call.lower ? std::min(in_chunk, static_cast<double>(call.left) + 1) : in_chunk;
}

/// Rounds of tiles over the SMs, times the time of a tile, in steps of 128 queries and 128 keys.
double predicted_time(const AttentionCall& call, const AttentionConfig& c, int units) {
  constexpr double kRowCost[] = {1.4, 1, 0.96, 0.95};  // more warpgroups hide more of each other's softmax
  const auto ceil_of = [](double a, double b) { return std::ceil(a / b); };
  const double tiles = ceil_of(static_cast<double>(call.q.shape(2)), c.rows) * static_cast<double>(call.q.shape(1) * call.q.shape(0));
  const double step = c.rows * c.keys / (128.0 * 128) * kRowCost[c.rows / 64 - 1] * (c.min_blocks == 2 ? 0.95 : 1) + 0.1;
  const double tile = (seen_keys(call) / c.keys + 0.5) * step + 2.0 / c.min_blocks;
  return ceil_of(tiles, units * c.min_blocks) * c.min_blocks * tile;
}

bool has_choice(const AttentionCall& call) {
  return call.qv.numel() == 0 && !call.split && !call.pages && !call.ragged() && !call.descaled && call.mask == nullptr && !call.blocks &&
         loads_by_tma(call);
}

std::string problem_key(const AttentionCall& call) {
  std::string key =
      tw::format("attention {} batch={},heads={},kv_heads={},seqlen_q={},seqlen_k={},head_dim={},value_dim={}", name_of(call.q.dtype()),
                 call.q.shape(0), call.q.shape(1), call.k.shape(1), call.q.shape(2), call.keys, call.q.shape(3), call.v.shape(3));
  if (call.upper) key += tw::format(",right={}", call.right);
  if (call.lower) key += tw::format(",left={}", call.left);
  if (call.chunk > 0) key += tw::format(",chunk={}", call.chunk);
  if (call.softcap > 0) key += " softcap";
  if (call.slopes) key += " alibi";
  return key;
}

TuneSpace gpu_space(const AttentionConfig& standard, const RuleTraits& rules) {
  return TuneSpace({{"rows", {64, 128, 192, 256}},
                    {"keys", {64, 80, 96, 128, 160, 176}},
                    {"stages", every(2, 4)},
                    {"min_blocks", {1, 2}},
                    {"lag", {0, 1}},
                    {"queries_in_registers", {0, 1}},
                    {"maxima_first", {0, 1}}},
                   [=](const TunePoint& p) {
                     const AttentionConfig c = with_values(standard, p.values(), rules);
                     return c == standard || fits(c);
                   });
}

/// Sequences times heads of keys, of which each is split.
int sequences_of(const AttentionCall& call) { return static_cast<int>(call.q.shape(0) * call.k.shape(1)); }

std::string decode_key(const AttentionCall& call, int rows) {
  return tw::format("decode {} sequences={},rows={},seqlen_k={},head_dim={},value_dim={}{}", name_of(call.q.dtype()), sequences_of(call),
                    rows, call.keys, call.k.shape(3), call.v.shape(3), call.pages ? tw::format(",page_size={}", call.page_size) : "");
}

std::int64_t or_else(std::int64_t value, std::int64_t other) { return value > 0 ? value : other; }

struct Shapes {
  Shape q, k, v, o;
};
struct Operands {
  Tensor q, k, v, o;
};
/// What prepares operands of random numbers for a problem, on which run(point, operands, stream) is timed.
template <class Run>
auto on_operands(const Shapes& shapes, DType dtype, Run run) {
  return [=](const Stream& stream, std::uint64_t seed) {
    const auto operand = [&](const Shape& shape, std::uint64_t n) { return random_operand(shape, dtype, seed + n, stream); };
    const Operands t{operand(shapes.q, 0), operand(shapes.k, 1), operand(shapes.v, 2), operand(shapes.o, 3)};
    return TuneOperands{[=](const TunePoint& point) { run(point, t, stream); }, t.o, bytes_of({&t.q, &t.k, &t.v, &t.o})};
  };
}

}  // namespace

AttentionConfig tuned_config(const AttentionCall& call) {
  const AttentionConfig standard = choose_config(call);
  if (!has_choice(call)) return standard;
  const std::vector<int>* const values = tuned_values(call.stream.device(), [&] { return problem_key(call); });
  if (values == nullptr) return standard;
  const RuleTraits rules = traits_of(call);
  const std::optional<TunePoint> point = gpu_space(standard, rules).find(*values);
  return point ? with_values(standard, point->values(), rules) : standard;
}

int tuned_splits(const AttentionCall& call, int rows) {
  if (const KeyBlocks& blocks = call.blocks) {
    // How many blocks are selected is known on the device only: at most as many as there are indices.
    const std::int64_t indices = blocks.of.indices ? blocks.of.indices->shape(3) * blocks.of.key_block : call.keys;
    return decode_splits(sequences_of(call), static_cast<int>(std::min<std::int64_t>(indices, call.keys)), blocks.of.key_block,
                         usable_units(call), kMostSplits);
  }
  if (call.sm_margin == 0 && call.chunk == 0 && rows <= kTileRows) {
    const std::vector<int>* const values = tuned_values(call.stream.device(), [&] { return decode_key(call, rows); });
    if (values != nullptr && values->size() == 1 && values->front() >= 1 && values->front() <= kMostSplits) return values->front();
  }
  return planned_splits(call.q.shape(0) * call.k.shape(1), rows, call.keys, call.chunk, usable_units(call));
}

int planned_splits(std::int64_t sequences, std::int64_t rows, std::int64_t seqlen_k, int chunk, int units) {
  constexpr std::int64_t kMany = std::int64_t{1} << 20;  // more tiles than that fill any device
  const std::int64_t tiles = sequences * std::max<std::int64_t>(1, (rows + kTileRows - 1) / kTileRows);
  // Of many rows the parts' results, in f32, are as many bytes as the keys of a short part: they are written and read again.
  const bool many_rows = rows > kTileRows;
  if (many_rows && tiles >= units) return 1;
  return decode_splits(static_cast<int>(std::min(tiles, kMany)),
                       static_cast<int>(chunk > 0 ? std::min<std::int64_t>(seqlen_k, chunk) : seqlen_k),
                       many_rows ? 4 * kPartKeys : kPartKeys, units, kMostSplits);
}

FamilyProblem tune_problem(const ShapeValues& shape, DType dtype, Device device) {
  const std::int64_t batch = shape["batch"], heads = shape["heads"], kv_heads = or_else(shape["kv_heads"], heads);
  const std::int64_t seqlen_q = shape["seqlen_q"], seqlen_k = or_else(shape["seqlen_k"], seqlen_q);
  const std::int64_t head_dim = shape["head_dim"], value_dim = or_else(shape["value_dim"], head_dim);
  require(device.is_cuda(), "attention has nothing to tune on the CPU; only a GPU has a choice");
  require(batch > 0 && heads > 0 && seqlen_q > 0 && head_dim > 0, "shape: batch, heads, seqlen_q and head_dim must be positive");
  const auto options_on = [causal = shape["causal"] != 0, window = shape["window"] > 0 ? shape.integer("window") : -1](
                              const Stream& stream) { return AttentionOptions{.causal = causal, .window_left = window, .stream = stream}; };
  const Shapes shapes{{batch, seqlen_q, heads, head_dim},
                      {batch, seqlen_k, kv_heads, head_dim},
                      {batch, seqlen_k, kv_heads, value_dim},
                      {batch, seqlen_q, heads, value_dim}};
  const auto of = [&](const Shape& s) { return placeholder(s, dtype); };
  const AttentionCall call =
      detail::check_attention(of(shapes.q), of(shapes.k), of(shapes.v), of(shapes.o), options_on(Stream::standard(Device::cpu())));
  const AttentionConfig config = choose_config(call);
  const RuleTraits rules = traits_of(call);
  const auto prepare = on_operands(shapes, dtype, [=](const TunePoint& point, const Operands& t, const Stream& stream) {
    run_on_gpu(detail::check_attention(t.q, t.k, t.v, t.o, options_on(stream)), with_values(config, point.values(), rules));
  });
  TuneSpace space = gpu_space(config, rules);
  TunePoint standard = point_of(space, values_of(config));
  const auto predict = [=, units = units_of(device)](const TunePoint& p) {
    int differences = 0;  // of the schedule, whose cost is not predicted
    for (const char* const name : {"stages", "lag", "queries_in_registers", "maxima_first"}) differences += p[name] != standard[name];
    return predicted_time(call, with_values(config, p.values(), rules), units) * (1 + 0.02 * differences);
  };
  return {problem_key(call), std::move(space), standard, predict, prepare};
}

FamilyProblem tune_decode_problem(const ShapeValues& shape, DType dtype, Device device) {
  const std::int64_t batch = shape["batch"], heads = shape["heads"], kv_heads = or_else(shape["kv_heads"], heads);
  const std::int64_t seqlen_q = shape["seqlen_q"], seqlen_k = shape["seqlen_k"], head_dim = shape["head_dim"];
  require(device.is_cuda(), "decode has nothing to tune on the CPU; only a GPU has a choice");
  require(batch > 0 && heads > 0 && seqlen_q > 0 && seqlen_k > 0 && head_dim > 0, "shape: all numbers must be positive");
  require(heads % kv_heads == 0, "shape: heads is {}; it must be a multiple of kv_heads, {}", heads, kv_heads);
  const std::int64_t rows = heads / kv_heads * seqlen_q;
  require(rows <= 64, "shape: {} queries of heads that share keys; more than 64 are not split, and there is no choice", rows);
  const Shape of_q{batch, seqlen_q, heads, head_dim}, of_k{batch, seqlen_k, kv_heads, head_dim};
  const Tensor q = placeholder(of_q, dtype), k = placeholder(of_k, dtype);
  const AttentionCall call = detail::check_attention(q, k, k, placeholder(of_q, dtype), {});
  const int units = units_of(device), sequences = sequences_of(call);
  const auto prepare = on_operands({of_q, of_k, of_k, of_q}, dtype, [](const TunePoint& point, const Operands& t, const Stream& stream) {
    attention_decode(t.q, t.k, t.v, t.o, {.num_splits = point["splits"]}, {.stream = stream});
  });
  const auto most = std::clamp<std::int64_t>(seqlen_k / kPartKeys, 1, kMostSplits);
  TuneSpace space({{"splits", every(1, static_cast<int>(most))}});
  TunePoint standard = point_of(space, {decode_splits(sequences, call.keys, kPartKeys, units, kMostSplits)});
  // Rounds of parts over the SMs, in steps of 128 keys; the sum of the parts is a launch more.
  const auto predict = [=](const TunePoint& p) {
    const double splits = p["splits"];
    const double rounds = std::ceil(sequences * splits / units), steps = std::ceil(static_cast<double>(seqlen_k) / kPartKeys / splits);
    return rounds * (steps + 4) + (splits > 1 ? 8 + 0.05 * splits : 0);
  };
  return {decode_key(call, static_cast<int>(rows)), std::move(space), std::move(standard), predict, prepare};
}

}  // namespace tw::kernels::attention
