#include "speech/audio/av/decoder.hpp"

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/log.h>
#include <libavutil/mem.h>
#include <libavutil/opt.h>
}

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace tw::speech {
namespace {

// What recorders, phones and browsers write, today or not long ago. FFmpeg knows ten times as many, hardly tested, and some that open
// other files or addresses.
constexpr const char* kContainers = "matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,aac,loas,caf,asf,avi,flv,mpegts,mpeg,amr,ac3,eac3,au,w64,wv";
constexpr const char* kCodecs =
    "opus,vorbis,aac,aac_latm,alac,flac,mp3float,mp3,mp2float,mp2,mp1float,ac3,eac3,amrnb,amrwb,libopencore_amrnb,libopencore_amrwb,"
    "wmav1,wmav2,wmapro,wmalossless,wavpack,adpcm_ima_qt,adpcm_ima_wav,adpcm_ms,gsm,gsm_ms,speex,libspeex,"
    "pcm_alaw,pcm_mulaw,pcm_u8,pcm_s8,pcm_s16le,pcm_s16be,pcm_s24le,pcm_s24be,pcm_s32le,pcm_s32be,pcm_f32le,pcm_f32be,pcm_f64le,pcm_f64be";

constexpr std::size_t kLargestAllocation = std::size_t{512} << 20;  // bytes: an index of 55 hours of packets takes half of it
constexpr int kBuffer = 1 << 16;

// Decoding takes a tenth of this even of audio at 8 kbit/s. Files that exceed it were made to.
constexpr auto kTimeAtLeast = std::chrono::seconds(30);
constexpr std::int64_t kBytesPerSecond = 100'000;

struct Free {
  void operator()(AVFormatContext* format) const { avformat_close_input(&format); }
  void operator()(AVIOContext* io) const {
    av_freep(&io->buffer);
    avio_context_free(&io);
  }
  void operator()(AVCodecContext* codec) const { avcodec_free_context(&codec); }
  void operator()(AVPacket* packet) const { av_packet_free(&packet); }
  void operator()(AVFrame* frame) const { av_frame_free(&frame); }
};

/// Decoding ended early.
struct Stop {
  AvResult result;
  std::string message = {};
};

std::string text_of(int error) {
  char text[AV_ERROR_MAX_STRING_SIZE] = "";
  av_strerror(error, text, sizeof(text));
  return text;
}

/// A sample as a float in [-1, 1].
float to_float(std::uint8_t x) { return static_cast<float>(x - 128) / 128; }
float to_float(std::int16_t x) { return static_cast<float>(x) / 32768; }
float to_float(std::int32_t x) { return static_cast<float>(x) / 2147483648.0F; }
float to_float(std::int64_t x) { return static_cast<float>(static_cast<double>(x) / 9223372036854775808.0); }
float to_float(float x) { return x; }
float to_float(double x) { return static_cast<float>(x); }

class Decoder {
 public:
  Decoder(const AvInput& input, const AvOutput& output)
      : input_(input), output_(output), deadline_(Clock::now() + kTimeAtLeast + std::chrono::seconds(input.size / kBytesPerSecond)) {}

  void run() {
    open();
    const std::unique_ptr<AVPacket, Free> packet(allocated(av_packet_alloc()));
    for (;;) {
      const int error = av_read_frame(format_.get(), packet.get());
      check_deadline();
      if (error == AVERROR_EOF) break;
      if (error < 0) damaged(error);
      if (packet->stream_index == stream_->index) {
        if ((packet->flags & AV_PKT_FLAG_CORRUPT) != 0) damaged(AVERROR_INVALIDDATA);
        decode(packet.get());
      }
      av_packet_unref(packet.get());
    }
    decode(nullptr);
  }

 private:
  using Clock = std::chrono::steady_clock;

  template <class T>
  static T* allocated(T* pointer) {
    if (!pointer) throw Stop{AvResult::failed, "its audio does not fit into memory"};
    return pointer;
  }

  [[noreturn]] void damaged(int error) const {
    char when[64];
    std::snprintf(when, sizeof(when), "damaged after %.3f s: ", rate_ > 0 ? static_cast<double>(frames_) / rate_ : 0.0);
    throw Stop{AvResult::failed, when + text_of(error)};
  }

  bool late() const { return Clock::now() > deadline_; }
  void check_deadline() const {
    if (late()) throw Stop{AvResult::failed, "damaged: decoding takes longer than a file of its size can need"};
  }

  static int read(void* self, std::uint8_t* to, int count) {
    Decoder& decoder = *static_cast<Decoder*>(self);
    if (decoder.late()) return AVERROR_EXIT;
    const std::int64_t got = decoder.input_.read(decoder.input_.self, decoder.at_, to, count);
    if (got <= 0) return AVERROR_EOF;
    decoder.at_ += got;
    return static_cast<int>(got);
  }

  static std::int64_t seek(void* self, std::int64_t offset, int whence) {
    Decoder& decoder = *static_cast<Decoder*>(self);
    if (whence == AVSEEK_SIZE) return decoder.input_.size;
    whence &= ~AVSEEK_FORCE;
    const std::int64_t base = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? decoder.at_ : decoder.input_.size;
    std::int64_t to = 0;
    if (__builtin_add_overflow(base, offset, &to) || to < 0) return AVERROR(EINVAL);
    return decoder.at_ = to;
  }

  void open() {
    io_.reset(allocated(
        avio_alloc_context(static_cast<unsigned char*>(allocated(av_malloc(kBuffer))), kBuffer, 0, this, &Decoder::read, nullptr, &seek)));
    AVFormatContext* format = allocated(avformat_alloc_context());
    format->pb = io_.get();
    format->flags |= AVFMT_FLAG_CUSTOM_IO;
    format->interrupt_callback = {[](void* self) { return static_cast<int>(static_cast<Decoder*>(self)->late()); }, this};
    // Containers may refer to other files and addresses: none is opened.
    format->io_open = [](AVFormatContext*, AVIOContext**, const char*, int, AVDictionary**) { return AVERROR(EPERM); };
    AVDictionary* options = nullptr;
    av_dict_set(&options, "format_whitelist", kContainers, 0);
    av_dict_set(&options, "codec_whitelist", kCodecs, 0);
    const int error = avformat_open_input(&format, nullptr, nullptr, &options);  // frees `format` if it fails
    av_dict_free(&options);
    check_deadline();
    if (error < 0) throw Stop{AvResult::unknown};
    format_.reset(format);
    const std::span<AVStream*> streams(format->streams, format->nb_streams);
    for (AVStream* stream : streams)
      if (stream->codecpar->codec_type != AVMEDIA_TYPE_AUDIO) stream->discard = AVDISCARD_ALL;
    if (const int problem = avformat_find_stream_info(format, nullptr); problem < 0) damaged(problem);
    check_deadline();

    const AVCodec* codec = nullptr;
    const int best = av_find_best_stream(format, AVMEDIA_TYPE_AUDIO, -1, -1, &codec, 0);
    if (best == AVERROR_STREAM_NOT_FOUND) throw Stop{AvResult::failed, "it holds no audio"};
    if (best < 0) throw Stop{AvResult::failed, "its audio cannot be decoded: " + text_of(best)};
    for (unsigned i = 0; i < format->nb_streams; ++i)
      if (static_cast<int>(i) != best) format->streams[i]->discard = AVDISCARD_ALL;
    stream_ = format->streams[best];
    codec_.reset(allocated(avcodec_alloc_context3(codec)));
    if (const int problem = avcodec_parameters_to_context(codec_.get(), stream_->codecpar); problem < 0) damaged(problem);
    codec_->pkt_timebase = stream_->time_base;
    codec_->thread_count = 1;
    codec_->codec_whitelist = av_strdup(kCodecs);
    codec_->err_recognition = AV_EF_CRCCHECK | AV_EF_BITSTREAM | AV_EF_BUFFER;
    if (const int problem = avcodec_open2(codec_.get(), codec, nullptr); problem < 0)
      throw Stop{AvResult::failed, std::string("its audio cannot be decoded: ") + codec->name + ": " + text_of(problem)};
    frame_.reset(allocated(av_frame_alloc()));
  }

  /// Null: the end.
  void decode(const AVPacket* packet) {
    const int error = avcodec_send_packet(codec_.get(), packet);
    if (error < 0 && error != AVERROR_EOF) damaged(error);
    for (;;) {
      const int result = avcodec_receive_frame(codec_.get(), frame_.get());
      if (result == AVERROR(EAGAIN) || result == AVERROR_EOF) return;
      if (result < 0) damaged(result);
      pass_on(*frame_);
      av_frame_unref(frame_.get());
      check_deadline();
    }
  }

  void pass_on(const AVFrame& frame) {
    const int channels = frame.ch_layout.nb_channels;
    if (frame.nb_samples <= 0) return;
    if (channels < 1 || frame.sample_rate < 1) damaged(AVERROR_INVALIDDATA);
    rate_ = frame.sample_rate;
    samples_.resize(static_cast<std::size_t>(frame.nb_samples) * static_cast<std::size_t>(channels));
    switch (frame.format) {
      case AV_SAMPLE_FMT_U8:
      case AV_SAMPLE_FMT_U8P:
        convert<std::uint8_t>(frame);
        break;
      case AV_SAMPLE_FMT_S16:
      case AV_SAMPLE_FMT_S16P:
        convert<std::int16_t>(frame);
        break;
      case AV_SAMPLE_FMT_S32:
      case AV_SAMPLE_FMT_S32P:
        convert<std::int32_t>(frame);
        break;
      case AV_SAMPLE_FMT_S64:
      case AV_SAMPLE_FMT_S64P:
        convert<std::int64_t>(frame);
        break;
      case AV_SAMPLE_FMT_FLT:
      case AV_SAMPLE_FMT_FLTP:
        convert<float>(frame);
        break;
      case AV_SAMPLE_FMT_DBL:
      case AV_SAMPLE_FMT_DBLP:
        convert<double>(frame);
        break;
      default:
        throw Stop{AvResult::failed, "its samples are of an unknown type"};
    }
    frames_ += frame.nb_samples;
    if (!output_.take(output_.self, samples_.data(), static_cast<std::size_t>(frame.nb_samples), channels, rate_))
      throw Stop{AvResult::done};
  }

  template <class T>
  void convert(const AVFrame& frame) {
    const auto channels = static_cast<std::size_t>(frame.ch_layout.nb_channels), count = static_cast<std::size_t>(frame.nb_samples);
    const bool planar = av_sample_fmt_is_planar(static_cast<AVSampleFormat>(frame.format)) != 0;
    for (std::size_t c = 0; c < channels; ++c) {
      const T* const from = reinterpret_cast<const T*>(frame.extended_data[planar ? c : 0]) + (planar ? 0 : c);
      for (std::size_t i = 0; i < count; ++i) samples_[i * channels + c] = to_float(from[planar ? i : i * channels]);
    }
  }

  AvInput input_;
  AvOutput output_;
  Clock::time_point deadline_;
  std::int64_t at_ = 0;
  std::unique_ptr<AVIOContext, Free> io_;  // outlives format_
  std::unique_ptr<AVFormatContext, Free> format_;
  AVStream* stream_ = nullptr;
  std::unique_ptr<AVCodecContext, Free> codec_;
  std::unique_ptr<AVFrame, Free> frame_;
  std::vector<float> samples_;
  std::int64_t frames_ = 0;
  int rate_ = 0;
};

}  // namespace
}  // namespace tw::speech

extern "C" tw::speech::AvResult tilewave_av_decode_1(const tw::speech::AvInput* input, const tw::speech::AvOutput* output, char* message,
                                                     std::size_t message_size) {
  using namespace tw::speech;
  static std::once_flag once;
  std::call_once(once, [] {
    // Both are of the whole process. A library must not write to its terminal, and a few bytes of MP4 can ask for gigabytes.
    if (av_log_get_level() == AV_LOG_INFO) av_log_set_level(AV_LOG_QUIET);
    av_max_alloc(kLargestAllocation);
  });
  try {
    Decoder(*input, *output).run();
    return AvResult::done;
  } catch (const Stop& stop) {
    std::snprintf(message, message_size, "%s", stop.message.c_str());
    return stop.result;
  } catch (const std::bad_alloc&) {
    std::snprintf(message, message_size, "its audio does not fit into memory");
    return AvResult::failed;
  }
}
static_assert(std::is_same_v<decltype(tilewave_av_decode_1), tw::speech::AvDecode>);
