// Kernels as the host sees them: which one a call needs, and starting it.
#pragma once
#include "kernels.cuh"

#include <cuda_runtime.h>

#include <chrono>
#include <stdexcept>
#include <string>

namespace purlin::gpu {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline Choice choose(const Call& call, int ranks, bool bulk) {
  bool copies = call.kind == Kind::copy;
  bulk = bulk && call.even;  // what bulk copies cannot carry is copied by one warp of each block
  switch (call.regime) {
    case Regime::packet: return copies ? packets(call, ranks) : packet_sums(call, ranks);
    case Regime::direct: return copies ? direct(call, ranks, bulk) : direct_sums(call, ranks);
    default: return copies ? staged(call, ranks, bulk) : staged_sums(call, ranks, bulk);
  }
}

// For ranks that share a launch: what one rank's strides and sizes ask for is not what another's do, so the kernel fits all of them. The call's kind,
// regime, teams and sum need to be the same.
inline Choice choose_for_all(const Launch* launches, int ranks, bool bulk) {
  Call all = launches[0].call;
  for (int r = 0; r < ranks; ++r) {
    const Call& call = launches[r].call;
    all.flat = all.flat && call.flat;
    all.even = all.even && call.even;
    all.parts = smaller(all.parts, call.parts);
    for (int p = 0; p < call.peers(); ++p)
      all.pair[0].send.bytes = larger(all.pair[0].send.bytes, call.pair[p].send.bytes);
  }
  return choose(all, ranks, bulk);
}
inline bool one_launch_serves(const Call& a, const Call& b) {
  return a.kind == b.kind && a.regime == b.regime && a.teams == b.teams &&
         (a.kind == Kind::copy || (a.sum.op == b.sum.op && a.sum.dtype == b.sum.dtype));
}

// `launches`: a Launch, or those of a fused world, whose teams together are `teams`; the kernel knows how many it takes.
inline void launch(const Choice& choice, int teams, const void* launches, cudaStream_t stream) {
  void* arguments[] = {const_cast<void*>(launches)};
  check(cudaLaunchKernel(choice.kernel, dim3(static_cast<unsigned>(teams * choice.parts)),
                         dim3(static_cast<unsigned>(choice.threads)), arguments,
                         static_cast<std::size_t>(choice.shared_bytes), stream),
        "launch");
}

// Loading a kernel behind one that spins can hang: load all that calls of `ranks` ranks a launch may need, once.
template <class F>
void for_each_choice(int ranks, bool bulk, F f) {
  Call call{};
  call.ranks = 2;
  call.teams = call.parts = 1;
  auto for_each_shape = [&](auto choice) {
    for (bool even : {true, false})
      for (bool flat : {true, false})
        for (Regime regime : {Regime::packet, Regime::direct, Regime::staged}) {
          call.even = even;
          call.flat = flat;
          call.regime = regime;
          choice();
        }
  };
  for_each_shape([&] {
    for (i64 bytes : {i64{0}, i64{1} << 40}) {
      call.pair[0].send.bytes = bytes;
      f(choose(call, ranks, bulk));
    }
  });
  call.kind = Kind::all_reduce;
  for_each_shape([&] {
    for (Op op : {Op::sum, Op::max})
      for (int dtype = 0; dtype <= static_cast<int>(Dtype::uint8); ++dtype) {
        call.sum = {op, static_cast<Dtype>(dtype)};
        f(choose(call, ranks, bulk));
      }
  });
}
inline void load_kernels(int ranks, bool bulk) {
  std::size_t stack = 0;
  check(cudaDeviceGetLimit(&stack, cudaLimitStackSize), "cudaDeviceGetLimit");
  for_each_choice(ranks, bulk, [stack](const Choice& choice) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, choice.kernel), "cudaFuncGetAttributes");
    // More than CUDA has set aside it would set aside at a launch, and wait until the GPU is idle: a peer's kernel that waits for this one never ends.
    if (attributes.localSizeBytes > stack)
      throw std::runtime_error("a kernel needs " + std::to_string(attributes.localSizeBytes) +
                               " bytes of local memory a thread, and cudaLimitStackSize is " + std::to_string(stack) +
                               "; raise it before the first communicator is made");
    if (choice.shared_bytes > 0)
      check(cudaFuncSetAttribute(choice.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, choice.shared_bytes),
            "cudaFuncSetAttribute");
  });
}
// On a GPU that runs PTX for an older one, the kernels for bulk copies are there, and empty.
inline bool bulk_copies_are_in_the_code() {
  Call copy{};
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, staged(copy, 1, true).kernel), "cudaFuncGetAttributes");
  return attributes.ptxVersion >= 90;
}
// Blocks that the current GPU holds at once, whichever of these kernels they run.
inline int resident_blocks(int ranks, bool bulk) {
  int device = 0, processors = 0, least = 1 << 30;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  for_each_choice(ranks, bulk, [&](const Choice& choice) {
    int each = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, choice.kernel, choice.threads,
                                                        static_cast<std::size_t>(choice.shared_bytes)),
          "occupancy");
    least = smaller(least, each);
  });
  return processors * least;
}

// The device of an endpoint is current while this lives.
class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device_) check(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~OnDevice() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int device_, before_ = 0;
};

}  // namespace purlin::gpu
