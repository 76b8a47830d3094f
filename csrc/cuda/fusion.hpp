// Ranks of one process: each brings its call, and the last one to come launches for all. On one GPU that is one kernel, so that all are resident together.
// On several it is a kernel each; nobody goes on before all have been launched, because what a rank may do next (allocate, load a kernel) can wait for
// every GPU of the process, and one of them would be waiting for a kernel that cannot be launched meanwhile.
#pragma once
#include "kernels.cuh"
#include "launch.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace purlin::gpu {

class Fusion {
 public:
  Fusion(const std::vector<int>& devices, bool bulk) : brought_(devices.size()), bulk_(bulk) {
    for (std::size_t r = 0; r < devices.size(); ++r) {
      brought_[r].device = devices[r];
      one_gpu_ = one_gpu_ && devices[r] == devices[0];
      OnDevice on(devices[r]);
      check(cudaEventCreateWithFlags(&brought_[r].event, cudaEventDisableTiming), "cudaEventCreate");
    }
  }
  ~Fusion() {
    for (Brought& b : brought_) cudaEventDestroy(b.event);
  }

  enum class Turn { launched, alone, differ, abandoned, left };
  struct Result {
    Turn how;
    int other;  // a rank that did not come, or that came with another call
  };

  // alone: the other ranks did not come within `timeout`; differ: one launch cannot serve their calls, so none was made; abandoned: a rank gave up, or an
  // earlier call has failed and its host need not come; left: a rank closed its communicator. Every rank's stream sees the launch as its own. Throws
  // std::runtime_error, on every rank, when CUDA refuses it.
  Result bring(const Launch& launch, cudaStream_t stream, std::chrono::nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    std::size_t rank = static_cast<std::size_t>(launch.call.rank);
    launches_.of[rank] = launch;
    brought_[rank].stream = stream;
    brought_[rank].here = true;
    long turn = turn_;
    if (over()) return ending();
    if (++come_ < static_cast<int>(brought_.size())) {
      await(lock, turn, timeout, *launch.page);
      if (turn_ == turn) {
        --come_;
        int missing = absent();
        brought_[rank].here = false;
        return over() ? ending() : Result{Turn::alone, missing};
      }
    } else {
      come_ = 0;
      for (Brought& b : brought_) b.here = false;
      how_ = fire(stream);
      ++turn_;
      everyone_.notify_all();
    }
    if (!refused_.empty()) throw std::runtime_error(refused_);
    return {how_, how_ == Turn::differ ? other_than(rank) : 0};
  }
  // Nobody waits any longer, now or later.
  void abandon() {
    std::lock_guard lock(mutex_);
    abandoned_ = true;
    everyone_.notify_all();
  }
  void leave(int rank) {
    std::lock_guard lock(mutex_);
    if (leaver_ < 0) leaver_ = rank;
    everyone_.notify_all();
  }
  // The signature of the latest call that a rank has brought.
  unsigned signature_of(int rank) {
    std::lock_guard lock(mutex_);
    return launches_.of[rank].call.signature;
  }

 private:
  static constexpr std::chrono::milliseconds look_every{20};
  struct Brought {
    int device;
    cudaStream_t stream;
    cudaEvent_t event;
    bool here;  // waits for the others
  };
  // Until all have come, somebody has given up, or it is too late. A kernel tells its failure through `page`, and wakes nobody.
  void await(std::unique_lock<std::mutex>& lock, long turn, std::chrono::nanoseconds timeout, const Page& page) {
    auto deadline = std::chrono::steady_clock::now() + timeout;
    while (turn_ == turn && !over() && std::chrono::steady_clock::now() < deadline) {
      everyone_.wait_for(lock, std::min<std::chrono::nanoseconds>(timeout, look_every));
      if (turn_ == turn && *static_cast<const volatile Word*>(&page.poison) != 0) {
        abandoned_ = true;
        everyone_.notify_all();
      }
    }
  }
  int other_than(std::size_t rank) const {  // the first rank that brought a call of another kind
    int r = 0;
    while (one_launch_serves(launches_.of[rank].call, launches_.of[r].call)) ++r;
    return r;
  }
  bool over() const { return abandoned_ || leaver_ >= 0; }
  Result ending() const { return abandoned_ ? Result{Turn::abandoned, 0} : Result{Turn::left, leaver_}; }
  int absent() const {
    int r = 0;
    while (r + 1 < static_cast<int>(brought_.size()) && brought_[static_cast<std::size_t>(r)].here) ++r;
    return r;
  }

  Turn fire(cudaStream_t stream) {
    refused_.clear();
    try {
      if (!one_gpu_) return fire_each();
      for (const Launch& other : std::span(launches_.of, brought_.size()))
        if (!one_launch_serves(launches_.of[0].call, other.call)) return Turn::differ;
      fire_one(stream);
    } catch (const std::runtime_error& error) {
      refused_ = error.what();
    }
    return Turn::launched;
  }
  void fire_one(cudaStream_t stream) {
    int ranks = static_cast<int>(brought_.size());
    for (Brought& b : brought_) {
      if (b.stream == stream) continue;
      check(cudaEventRecord(b.event, b.stream), "cudaEventRecord");
      check(cudaStreamWaitEvent(stream, b.event), "cudaStreamWaitEvent");
    }
    gpu::launch(choose_for_all(launches_.of, ranks, bulk_), launches_.of[0].call.teams * ranks, &launches_, stream);
    check(cudaEventRecord(brought_[0].event, stream), "cudaEventRecord");
    for (Brought& b : brought_)
      if (b.stream != stream) check(cudaStreamWaitEvent(b.stream, brought_[0].event), "cudaStreamWaitEvent");
  }
  Turn fire_each() {
    for (std::size_t r = 0; r < brought_.size(); ++r) {
      const Launch& mine = launches_.of[r];
      OnDevice on(brought_[r].device);
      gpu::launch(choose(mine.call, 1, bulk_), mine.call.teams, &mine, brought_[r].stream);
    }
    return Turn::launched;
  }

  std::mutex mutex_;
  std::condition_variable everyone_;
  Launches<most_fused> launches_{};
  std::vector<Brought> brought_;
  bool bulk_, one_gpu_ = true, abandoned_ = false;
  int come_ = 0, leaver_ = -1;
  long turn_ = 0;
  Turn how_ = Turn::launched;
  std::string refused_;
};

}  // namespace purlin::gpu
