#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/gpu.hpp"
#include "runtime/stream.hpp"
#include "tests/support.hpp"
#include "tilewave/error.hpp"
#include "tilewave/tensor.hpp"

namespace tw::test {
namespace {

class Streams : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(, Streams, testing::ValuesIn(kDevices), device_name);

TEST_P(Streams, KnowTheirDevice) {
  skip_unless_present(GetParam());
  const Stream own(GetParam());
  EXPECT_EQ(own.device(), GetParam());
  EXPECT_EQ(own.native() != nullptr, GetParam().is_cuda());
  EXPECT_EQ(Stream::standard(GetParam()).native(), Stream::standard(GetParam()).native());
  const Stream copy = own;
  EXPECT_EQ(copy.native(), own.native());
  EXPECT_NO_THROW(own.synchronize());
  const Stream borrowed = Stream::borrow(GetParam(), own.native());
  EXPECT_EQ(borrowed.native(), own.native());
  EXPECT_NO_THROW(borrowed.synchronize());
}

TEST_P(Streams, EventsMeasureTime) {
  skip_unless_present(GetParam());
  const Stream stream(GetParam());
  Event begin(GetParam());
  Event end(GetParam());
  EXPECT_THROW(Event::milliseconds(begin, end), InvalidArgument);
  begin.record(stream);
  begin.synchronize();
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  end.record(stream);
  const float ms = Event::milliseconds(begin, end);
  EXPECT_GE(ms, 4.5f);
  EXPECT_LT(ms, 5000.0f);
}

TEST(StreamsOfTheCpu, TakeNoForeignHandle) {
  int something = 0;
  EXPECT_THROW(Stream::borrow(Device::cpu(), &something), InvalidArgument);
}

TEST(StreamsOfTheGpu, cuda_EventsAndGraphsWantTheirDevice) {
  skip_without_cuda();
  Event event(Device::cuda());
  EXPECT_THROW(event.record(Stream(Device::cpu())), InvalidArgument);
  const Event host(Device::cpu());
  EXPECT_THROW(Event::milliseconds(event, host), InvalidArgument);
}

TEST(GraphOfTheCpu, KeepsTheWorkAndRepeatsIt) {
  const Stream stream(Device::cpu());
  int runs = 0;
  const Graph graph = Graph::capture(stream, [&] { ++runs; });
  EXPECT_EQ(runs, 0);
  graph.replay(stream);
  graph.replay(stream);
  EXPECT_EQ(runs, 2);
}

TEST(GraphOfTheCpu, RefusesNothing) {
  EXPECT_THROW(Graph::capture(Stream(Device::cpu()), nullptr), InvalidArgument);
  EXPECT_THROW(Graph().replay(Stream(Device::cpu())), InvalidArgument);
}

TEST(GraphOfTheCpu, PassesExceptionsOn) {
  const Stream stream(Device::cpu());
  const Graph graph = Graph::capture(stream, [] { throw std::runtime_error("from the work"); });
  EXPECT_THROW(graph.replay(stream), std::runtime_error);
}

/// Adds up on the GPU without a kernel: sets `bytes` of `tensor` to `value`.
void set_bytes(const Tensor& tensor, unsigned char value, const Stream& stream) {
  const CurrentContext current(Gpu::get(0));
  cuda::check(cuda::driver().memset_d8_async(reinterpret_cast<cuda::Address>(tensor.data()), value,
                                             static_cast<std::size_t>(tensor.numel()), StreamAccess::native(stream)),
              "cuMemsetD8Async");
}

TEST(GraphOfTheGpu, cuda_CapturesWithoutRunningAndReplays) {
  skip_without_cuda();
  const Stream stream(Device::cuda());
  const Tensor tensor = Tensor::zeros({1000}, DType::u8, stream);
  stream.synchronize();
  const Graph graph = Graph::capture(stream, [&] { set_bytes(tensor, 7, stream); });
  stream.synchronize();
  EXPECT_EQ(tensor.to(Device::cpu()).at({999}), 0);
  graph.replay(stream);
  stream.synchronize();
  EXPECT_EQ(tensor.to(Device::cpu()).at({999}), 7);
  set_bytes(tensor, 1, stream);
  const Stream other(Device::cuda());
  stream.synchronize();
  graph.replay(other);
  other.synchronize();
  EXPECT_EQ(tensor.to(Device::cpu()).at({0}), 7);
}

TEST(GraphOfTheGpu, cuda_StreamSurvivesWorkThatThrows) {
  skip_without_cuda();
  const Stream stream(Device::cuda());
  const Tensor tensor = Tensor::zeros({16}, DType::u8, stream);
  stream.synchronize();
  EXPECT_THROW(Graph::capture(stream,
                              [&] {
                                set_bytes(tensor, 3, stream);
                                throw std::runtime_error("from the work");
                              }),
               std::runtime_error);
  set_bytes(tensor, 9, stream);
  stream.synchronize();
  EXPECT_EQ(tensor.to(Device::cpu()).at({15}), 9);
}

TEST(GraphOfTheGpu, cuda_AllocationDuringCaptureIsRefused) {
  skip_without_cuda();
  const Stream stream(Device::cuda());
  EXPECT_THROW(Graph::capture(stream, [&] { allocate(1024, stream); }), DeviceError);
  EXPECT_NE(allocate(1024, stream), nullptr);
}

TEST(GraphOfTheGpu, cuda_CountersOfCapturedLaunchesAreTheirOwn) {
  skip_without_cuda();
  const Stream stream(Device::cuda());
  unsigned* outside = StreamAccess::counter_for_launch(stream);
  EXPECT_EQ(outside, StreamAccess::counter_for_launch(stream));
  unsigned* inside[2] = {};
  const Tensor tensor = Tensor::zeros({16}, DType::u8, stream);
  {
    const Graph graph = Graph::capture(stream, [&] {
      set_bytes(tensor, 1, stream);
      inside[0] = StreamAccess::counter_for_launch(stream);
      inside[1] = StreamAccess::counter_for_launch(stream);
    });
    EXPECT_NE(inside[0], nullptr);
    EXPECT_NE(inside[0], outside);
    EXPECT_NE(inside[0], inside[1]);
  }
  // The graph gave them back.
  unsigned* again[2] = {Gpu::get(0).take_counter(), Gpu::get(0).take_counter()};
  EXPECT_TRUE((again[0] == inside[0] && again[1] == inside[1]) || (again[0] == inside[1] && again[1] == inside[0]));
  for (unsigned* counter : again) {
    const Tensor words = Tensor::borrow(counter, {2}, DType::i32, Device::cuda());
    EXPECT_EQ(words.to(Device::cpu()).at({0}), 0);
    EXPECT_EQ(words.to(Device::cpu()).at({1}), 0);
    Gpu::get(0).give_back_counter(counter);
  }
}

TEST_P(Streams, MillisecondsAreTheMedianOfSomeCalls) {
  skip_unless_present(GetParam());
  const Stream stream(GetParam());
  int calls = 0;
  // The first call, which warms up, and one later call take much longer.
  const float ms = milliseconds(stream, [&] {
    ++calls;
    std::this_thread::sleep_for(std::chrono::milliseconds(calls == 1 || calls == 3 ? 400 : 10));
  });
  EXPECT_GT(calls, 3);
  EXPECT_GE(ms, 9);
  EXPECT_LT(ms, 300);
}

TEST_P(Streams, MillisecondsNeedWork) {
  skip_unless_present(GetParam());
  const Stream stream(GetParam());
  EXPECT_THROW(milliseconds(stream, nullptr), InvalidArgument);
  EXPECT_THROW(milliseconds(stream, [] { throw std::runtime_error("from the work"); }), std::runtime_error);
}

}  // namespace
}  // namespace tw::test
