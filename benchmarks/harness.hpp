#pragma once

// What every family's benchmark shares: how launches are timed, what is recorded, and how it is reported. benchmarks/README.md explains the
// modes.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tilewave/device.hpp"
#include "tilewave/dtype.hpp"
#include "tilewave/tensor.hpp"

namespace tw::bench {

/// How launches follow one another while they are timed.
enum class Mode {
  hot,        ///< all contenders in random order, no pause: a power-limited GPU settles at its sustained clock
  cool,       ///< the same, but the device idles 40 ms before each burst of 3: near its highest clock
  graph,      ///< 20 launches captured into a graph and replayed, hot: no launch cost
  one_thread  ///< CPU, one thread, in random order
};
std::string_view name_of(Mode mode);

/// One of the things that are compared. `launch` enqueues one execution on the stream that measure() is given.
struct Contender {
  std::string name;
  std::function<void()> launch;
};

/// Milliseconds per launch: the median of the samples, and the values that a tenth of them lie below and above.
struct Timing {
  double median = 0;
  double p10 = 0;
  double p90 = 0;
};

/// How long to measure.
struct Effort {
  int samples = 60;         ///< per contender
  double burst_ms = 2;      ///< a sample is the mean over as many launches as take this long (cool: over 3)
  double warm_up_ms = 300;  ///< before the first sample
  static Effort standard(Mode mode);
  static Effort quick(Mode mode);
};

/// Times all contenders together, interleaved in an order that is random in each round. Timing is by events on `stream`.
std::vector<Timing> measure(Mode mode, const std::vector<Contender>& contenders, const Stream& stream, const Effort& effort);

/// One figure, as written to benchmarks/results/. Times become rates of `unit`; 0 means unknown and is written as null.
struct Record {
  std::string family;
  std::string case_name;
  DType dtype = DType::f32;
  Mode mode = Mode::hot;
  std::string unit;  ///< "TFLOP/s", "GFLOP/s" or "GB/s"; kMicroseconds: the figures are times, of which less is better
  double work = 0;   ///< units x seconds of one launch: its TFLOP, GFLOP or GB; not used for times
  Timing ours;
  std::string config;  ///< which variant of ours ran, for people; may be empty
  std::string peer;    ///< "cublasLt", "openblas", "copy"; empty if there was none
  Timing peer_time;
  std::string peer_config;  ///< which of the peer's ways was the fastest, for people; may be empty
  double limit = 0;         ///< in `unit`: what the hardware allows at most, or the time that it takes at least
  std::string bound;        ///< what sets the limit: "memory", "arithmetic", "launch"; empty where the family leaves no doubt
  std::string group;        ///< figures of one group have a table of their own; empty: the family's
};
/// The unit of records that are times.
inline constexpr const char* kMicroseconds = "us";

/// What the user asked for, and what is shared by all figures of a run.
struct Options {
  Device device;
  std::vector<std::string> cases;  ///< keep cases whose name contains one of these; empty: all
  std::vector<DType> dtypes;       ///< keep these; empty: all
  bool quick = false;              ///< fewer samples: +-3 % rather than +-1 %
  bool list = false;               ///< only name the cases
  bool all_configs = false;        ///< also time every variant of ours, for tuning: all then share the card's power budget
  int config = -1;                 ///< the variant of ours to time; -1: the heuristic's choice
  bool ladder = false;             ///< instead of the cases: the ways to do it, from the plainest to ours, an idea more each
  std::string commit;              ///< instead of the commit that was compiled in
  std::FILE* table = stdout;       ///< where records are printed as they are made
};

/// One run of the benchmarks: prints each record as it is made and collects them.
class Run {
 public:
  struct Listed {
    std::string family, case_name;
    DType dtype;
  };

  explicit Run(Options options);

  const Options& options() const { return options_; }
  const Stream& stream() const { return stream_; }
  Effort effort(Mode mode) const { return options_.quick ? Effort::quick(mode) : Effort::standard(mode); }

  /// Bytes read plus bytes written per second by a large copy on the run's device, hot; on the CPU by one thread. Measured at first use.
  double copy_bandwidth();
  /// Bytes read per second, 1 GB hot; on the CPU by one thread. Measured at first use.
  double read_bandwidth();

  /// Whether the user wants this case measured. Under Options::list it is only remembered.
  bool wants(const std::string& family, const std::string& case_name, DType dtype);
  const std::vector<Listed>& listed() const { return listed_; }
  /// The version of something that takes part: "cublasLt", "13.1.0".
  void set_version(const std::string& what, const std::string& version) { versions_[what] = version; }
  /// A line for people, on stderr: a peer that is missing, say.
  void note(const std::string& text) const;
  void add(const Record& record);
  /// Prints a line of results that are not records, such as errors.
  void print(const std::string& line);

  nlohmann::ordered_json json() const;
  /// Records that were added, and lines that were printed.
  std::size_t count() const { return records_.size() + lines_; }

 private:
  Options options_;
  Stream stream_;
  std::map<std::string, std::string> versions_;
  std::string date_;  ///< when the run began, in UTC: all that it writes is of one date
  std::vector<Record> records_;
  std::size_t lines_ = 0;
  std::vector<Listed> listed_;
  double copy_bandwidth_ = 0;
  double read_bandwidth_ = 0;
  bool header_printed_ = false;
};

/// A family's benchmark. Defining one at namespace scope makes it known: `const bench::Family gemm{"gemm", "...", run};`
class Family {
 public:
  /// `ladder`: what Options::ladder asks for; may be empty.
  Family(std::string name, std::string what, std::function<void(Run&)> run, std::function<void(Run&)> ladder = {});
  static const std::vector<const Family*>& all();
  /// Null when there is none of that name.
  static const Family* find(const std::string& name);

  const std::string& name() const { return name_; }
  const std::string& what() const { return what_; }
  bool has_ladder() const { return ladder_ != nullptr; }
  void run(Run& run) const { (run.options().ladder ? ladder_ : run_)(run); }

 private:
  std::string name_;
  std::string what_;
  std::function<void(Run&)> run_, ladder_;
};

/// While it lives, the CPU target uses one thread.
class OneThread {
 public:
  OneThread() : before_(cpu_threads()) { set_cpu_threads(1); }
  ~OneThread() { set_cpu_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

/// A tensor of normally distributed values on `device`. Values repeat after a prime number of about four million, so that even the largest
/// are made in a fraction of a second.
Tensor random_normal(Shape shape, DType dtype, Device device, std::uint64_t seed);

/// What the hardware allows, from the vendor's data sheet (dense, with the boost clock).
struct GpuLimits {
  double bf16_tflops = 0;  ///< also f16
  double tf32_tflops = 0;
  double bytes_per_second = 0;
};
/// Nothing for a GPU that the table does not know.
std::optional<GpuLimits> gpu_limits(const std::string& device_name);

/// GFLOP/s that one thread reaches on fused multiply-adds in registers, f32, measured with the widest instruction set that the CPU has.
double measure_fma_peak();

}  // namespace tw::bench
