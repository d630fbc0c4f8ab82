// Stands in for libFuzzer where there is none: -runs=N random inputs from -seed=S, then the files
// named.

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  unsigned long n_runs = 0;
  unsigned long seed = 1;
  std::vector<std::string> files;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("-runs=")) {
      n_runs = std::stoul(argv[i] + 6);
    } else if (argument.starts_with("-seed=")) {
      seed = std::stoul(argv[i] + 6);
    } else {
      files.emplace_back(argument);
    }
  }
  std::mt19937_64 random(seed);
  std::vector<std::uint8_t> input;
  for (unsigned long run = 0; run < n_runs; ++run) {
    input.resize(random() % 512);
    for (std::uint8_t& byte : input) byte = static_cast<std::uint8_t>(random());
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  for (const std::string& name : files) {
    std::ifstream file(name, std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "cannot read %s\n", name.c_str());
      return 1;
    }
    input.assign(std::istreambuf_iterator<char>(file), {});
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%lu random inputs of seed %lu and %zu files\n", n_runs, seed, files.size());
}
