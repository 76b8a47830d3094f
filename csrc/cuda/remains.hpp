// Memory that destructors leave behind. To give it back is to wait for the GPU, and Python may destroy garbage in any thread and at any time: also in the
// thread of a rank for which another rank's kernel waits. So it is given back at set-up, at close, and as soon as no endpoint is left.
#pragma once
#include <cuda_runtime.h>

#include <mutex>
#include <vector>

namespace purlin::gpu {

class Remains {
 public:
  static Remains& of_process() {
    static auto& all = *new Remains;  // for destructors that run while the process ends, too
    return all;
  }

  void endpoint_begins() {
    std::lock_guard lock(mutex_);
    ++endpoints_;
  }
  void endpoint_ends() {
    {
      std::lock_guard lock(mutex_);
      if (--endpoints_ > 0) return;
    }
    give_back();
  }
  // `give`: cudaFree or cudaFreeHost.
  void leave(void* memory, cudaError_t (*give)(void*)) {
    {
      std::lock_guard lock(mutex_);
      left_.push_back({memory, give});
      if (endpoints_ > 0) return;
    }
    give_back();
  }
  void give_back() {
    std::vector<Left> all;
    {
      std::lock_guard lock(mutex_);
      all.swap(left_);
    }
    for (const Left& each : all) each.give(each.memory);
  }

 private:
  struct Left {
    void* memory;
    cudaError_t (*give)(void*);
  };

  std::mutex mutex_;
  int endpoints_ = 0;
  std::vector<Left> left_;
};

}  // namespace purlin::gpu
