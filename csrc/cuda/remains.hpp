// Memory that destructors leave behind. To give it back is to wait for the GPU, and Python may destroy garbage in any thread and at any time: also in the
// thread of a rank for which another rank's kernel waits. So it is given back where waiting does no harm: at set-up, at close, and when plans have been
// forgotten, unless ranks launch on streams of their own. Destructors do it themselves once no endpoint is left, for then no kernel waits for a thread.
#pragma once
#include <cuda_runtime.h>
#include <unistd.h>

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
    if (is_forked()) return;
    {
      std::lock_guard lock(mutex_);
      if (--endpoints_ > 0) return;
    }
    give_back();
  }
  // `give`: cudaFree or cudaFreeHost.
  void leave(void* memory, cudaError_t (*give)(void*)) {
    if (is_forked()) return;
    {
      std::lock_guard lock(mutex_);
      left_.push_back({memory, give});
      if (endpoints_ > 0) return;
    }
    give_back();
  }
  // While another thread captures a CUDA graph, too. What the GPU does not take stays.
  void give_back() {
    if (is_forked()) return;
    std::vector<Left> all;
    {
      std::lock_guard lock(mutex_);
      all.swap(left_);
    }
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    std::erase_if(all, [](const Left& each) { return each.give(each.memory) == cudaSuccess; });
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (all.empty()) return;
    cudaGetLastError();
    std::lock_guard lock(mutex_);
    left_.insert(left_.end(), all.begin(), all.end());
  }

 private:
  struct Left {
    void* memory;
    cudaError_t (*give)(void*);
  };

  // A child owns none of this, and whoever held the lock is not there.
  bool is_forked() const { return getpid() != process_; }

  pid_t process_ = getpid();
  std::mutex mutex_;
  int endpoints_ = 0;
  std::vector<Left> left_;
};

}  // namespace purlin::gpu
