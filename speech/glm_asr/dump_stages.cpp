// dump_stages CHECKPOINT AUDIO DEVICE DTYPE DIRECTORY: writes the model's results for a recording's windows, for tools/parity.py: the
// encoder's output and the scores of the first token, as DIRECTORY/encoder.npy and logits.npy.

#include <cstdio>
#include <fstream>

#include "speech/audio/audio.hpp"
#include "speech/glm_asr/model.hpp"

#include "runtime/format.hpp"

namespace {

using tw::Tensor;

/// NumPy's file format, version 1.0.
void write_npy(const std::string& file, const Tensor& tensor) {
  const Tensor values = tensor.to(tw::Device::cpu()).to(tw::DType::f32);
  std::string shape;
  for (const std::int64_t extent : values.shape()) shape += tw::format("{}, ", extent);
  std::string header = tw::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}), }}", shape);
  header.append(63 - (10 + header.size()) % 64, ' ');
  header += '\n';
  std::ofstream out(file, std::ios::binary);
  out << "\x93NUMPY" << '\1' << '\0' << static_cast<char>(header.size() % 256) << static_cast<char>(header.size() / 256) << header;
  out.write(static_cast<const char*>(values.data()), values.numel() * 4);
  if (!out.flush()) throw tw::FileError(file + ": cannot be written");
}

void run(int argc, char** argv) {
  using namespace tw::speech;
  LoadOptions options{.device = tw::Device::parse(argv[3]), .dtype = tw::parse_dtype(argv[4])};
  if (argc == 7) options.weights = tw::parse_weight_layout(argv[6]);
  const tw::Stream stream(options.device);
  const tw::ScopedF32Products exact(tw::F32Products::exact);
  const GlmAsr model = GlmAsr::load(argv[1], options, stream);
  const MelFeatures mel = model.mel.extract(load_audio(argv[2]));
  const Tensor x = model.encoder.convolve(mel.features, stream);
  for (int layer = 0; layer < model.config.encoder.layers; ++layer) model.encoder.run_layer(layer, x, stream);
  const Tensor encoded = model.encoder.normalise(x, stream);
  const Tensor embeddings = model.encoder.project(encoded, stream);
  std::vector<Tensor> rows;
  int places = 0;
  for (std::size_t w = 0; w < mel.real_frames.size(); ++w) {
    const int real = GlmAsrConfig::embeddings(mel.real_frames[w]);
    rows.push_back(embeddings.select(0, static_cast<std::int64_t>(w)).slice(0, 0, real));
    places += real;
  }
  const std::vector<int> prompt = model.prompt(model.config.prompt, places);
  tw::models::KvCache cache = model.decoder.make_cache(static_cast<int>(prompt.size()), stream);
  const Tensor logits = model.decoder.prefill(model.embed(prompt, rows, stream), cache, stream);
  stream.synchronize();
  write_npy(std::string(argv[5]) + "/encoder.npy", encoded);
  write_npy(std::string(argv[5]) + "/logits.npy", logits);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6 && argc != 7) {
    tw::print(stderr, "usage: dump_stages CHECKPOINT AUDIO DEVICE DTYPE DIRECTORY [WEIGHTS]\n");
    return 2;
  }
  try {
    run(argc, argv);
    return 0;
  } catch (const std::exception& error) {
    tw::print(stderr, "dump_stages: {}\n", error.what());
    return 1;
  }
}
