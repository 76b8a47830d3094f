// The soak of soak.hpp on a GPU: all ranks of a world on one, fused in a launch or each on a stream of its own, eager or replayed from graphs. Built with
// late.cuh (`device_late`) the kernels dawdle too: a rank at a time, at each operation of the protocol in turn. It needs the GPU for itself: a deadline goes
// by the clock, whoever has the GPU meanwhile.
#include "soak.hpp"

#include <cuda_runtime.h>

#include <cstdlib>

namespace purlin::test {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

__global__ void copy_bytes(char* to, const char* from, i64 bytes) {
  i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes; i += step) to[i] = from[i];
}
__global__ void compare_bytes(const char* at, const char* expected, i64 bytes, Word* first_wrong) {
  i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes; i += step)
    if (at[i] != expected[i]) atomicMin(first_wrong, static_cast<Word>(i));
}
__global__ void spin(long long cycles) {
  for (long long start = clock64(); clock64() - start < cycles;) {}
}

constexpr int threads = 256;
constexpr long long cycles_a_microsecond = 1800;
unsigned blocks_for(i64 bytes) { return static_cast<unsigned>(larger<i64>(1, smaller<i64>(16, bytes / 4096))); }

class Gpu final : public Ground {
 public:
  Gpu() {
    // Kernels that dawdle need more local memory than a thread has by default. Those that do not are held to that wherever a communicator is made.
    check(cudaDeviceSetLimit(cudaLimitStackSize, 2048), "cudaDeviceSetLimit");
    for (cudaStream_t& s : streams_) check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "cudaStreamCreate");
    for (const void* kernel : {reinterpret_cast<const void*>(copy_bytes), reinterpret_cast<const void*>(compare_bytes),
                               reinterpret_cast<const void*>(spin)}) {
      cudaFuncAttributes loaded;
      check(cudaFuncGetAttributes(&loaded, kernel), "cudaFuncGetAttributes");
    }
    for (cudaStream_t& s : streams_)
      spin<<<1, 1, 0, s>>>(0);  // what a first launch sets up is there before anything spins
    check(cudaDeviceSynchronize(), "spin");
  }
  Limits limits() const override { return {48 << 20, 4 << 20, 48, true, 10000}; }
  char* take(i64 bytes) override {
    void* there = nullptr;
    i64 all = larger<i64>(bytes, 1);
    check(cudaMalloc(&there, static_cast<size_t>(all)), "cudaMalloc");
    taken_.push_back(there);
    check(cudaMemset(there, canary, static_cast<size_t>(all)), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaMemset");
    return static_cast<char*>(there);
  }
  void give_back() override {
    for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
    for (void* memory : taken_) cudaFree(memory);
    graphs_.clear();
    taken_.clear();
  }
  void write(char* to, const void* from, i64 bytes) override {
    check(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaStreamSynchronize(cudaStreamLegacy), "cudaMemcpy");  // which may return before the bytes have arrived
  }
  void read(void* to, const char* from, i64 bytes) override {
    check(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

  Stream stream(int k) override { return reinterpret_cast<Stream>(streams_[k]); }
  void copy(Stream stream, char* to, const char* from, i64 bytes) override {
    copy_bytes<<<blocks_for(bytes), threads, 0, of(stream)>>>(to, from, bytes);
    check(cudaGetLastError(), "copy_bytes");
  }
  void compare(Stream stream, const char* at, const char* expected, i64 bytes, Word* first_wrong) override {
    compare_bytes<<<blocks_for(bytes), threads, 0, of(stream)>>>(at, expected, bytes, first_wrong);
    check(cudaGetLastError(), "compare_bytes");
  }
  void dawdle(Stream stream, int microseconds) override {
    spin<<<1, 1, 0, of(stream)>>>(microseconds * cycles_a_microsecond);
    check(cudaGetLastError(), "spin");
  }
  void finish(Stream stream) override { check(cudaStreamSynchronize(of(stream)), "cudaStreamSynchronize"); }

  // Ranks in a launch record one stream from several threads, hence `relaxed`.
  void begin_record(Stream stream) override {
    check(cudaStreamBeginCapture(of(stream), cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
  }
  int end_record(Stream stream) override {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    check(cudaStreamEndCapture(of(stream), &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphUpload(ready, of(stream)), "cudaGraphUpload");
    check(cudaStreamSynchronize(of(stream)), "cudaGraphUpload");
    cudaGraphDestroy(graph);
    std::lock_guard lock(mutex_);
    graphs_.push_back(ready);
    return static_cast<int>(graphs_.size()) - 1;
  }
  void play(int recording, Stream stream) override {
    check(cudaGraphLaunch(graphs_[static_cast<size_t>(recording)], of(stream)), "cudaGraphLaunch");
  }

 private:
  static cudaStream_t of(Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

  cudaStream_t streams_[most_ranks];
  std::vector<void*> taken_;
  std::mutex mutex_;
  std::vector<cudaGraphExec_t> graphs_;
};

}  // namespace
}  // namespace purlin::test

int main(int argc, char** argv) {
  // A hardware queue for every stream, and no kernel that is loaded while another waits for its rank.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  try {
    purlin::test::Gpu gpu;
    return purlin::test::soak(argc, argv, gpu);
  } catch (const std::exception& error) {
    return std::printf("device: %s\n", error.what()), 2;
  }
}
