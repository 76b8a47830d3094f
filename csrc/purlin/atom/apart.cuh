// Apart: a staging and a consuming role of a team side by side, each of three kinds of warps, so that nobody who copies ever polls the link or fences:
//     watcher  polls words ahead of the copiers          -> go[k]:   how the k-th wait has ended, came[k]: whether what it waits for has come
//     copiers  move the bytes                            -> done[k]: what the k-th notify publishes has been issued
//     notifier fences and stores the words, a peer a lane
// A gate of a ring is used again only when the other side has passed it (passed, told).
#pragma once
#include "sums.cuh"
#include "tally.cuh"

namespace purlin::gpu {

constexpr int gates = 8;

template <int copiers>
struct Crossing {  // of one role, in shared memory
  ptx::Gate go[gates], passed[gates], done[gates], told[gates];
  bool came[gates];
  char* slots[2][max_ranks];
  int failed;

  __device__ void init() {
    for (int k = 0; k < gates; ++k) {
      ptx::gate_init(go + k, 1);
      ptx::gate_init(passed + k, copiers / warp);
      ptx::gate_init(done + k, copiers / warp);
      ptx::gate_init(told + k, 1);
    }
    failed = 0;
  }
};

template <class Adding, int copiers>
class Apart : public RingHands {
 public:
  static constexpr int role_threads = copiers + 2 * warp;
  enum class Kind { copier, watcher, notifier };

  // `thread` of role_threads of role `role`.
  __device__ Apart(const Launch& launch, int team, int role, int thread, Crossing<copiers>* x, const Tally* tally)
      : RingHands(launch, team, role, thread, tally),
        kind_(thread < copiers          ? Kind::copier
              : thread < copiers + warp ? Kind::watcher
                                        : Kind::notifier),
        lane_(thread < copiers ? thread : thread % warp),
        x_(x) {}

  __device__ void copy(const Place& to, const Place& from, Range range) {
    if (kind_ == Kind::copier) gpu::copy_apart(to, from, range, {lane_, copiers});
  }
  template <class T, class F>
  __device__ void reduce(int places, T to, const Place& own, int n, F slot, int self, Range range, Sum sum) {
    if (kind_ != Kind::copier) return;
    if (n == 2 && add_pair(places, to, own, slot, self, range, sum)) return;
    char** slots = x_->slots[reductions_++ % 2];
    if (lane_ < n && lane_ != self) slots[lane_] = const_cast<char*>(slot(lane_));
    ptx::barrier(copier_barrier(), copiers);
    with_adds<Adding>(sum, [&](auto adds) {
      gpu::reduce<decltype(adds)>(to(0), own, n, slots, self, range, sum.op, {lane_, copiers});
    });
    if (places > 1) ptx::barrier(copier_barrier(), copiers);  // other lanes have written what this one reads
    for (int k = 1; k < places; ++k) gpu::copy_apart(to(k), to(0), range, {lane_, copiers});
  }
  template <class F>
  __device__ void notify(int n, F mark) {
    int k = notifies_++;
    if (kind_ == Kind::copier) {
      if (k >= gates && !passes(x_->told + k % gates, k / gates - 1)) return;
      __syncwarp();
      if (lane_ % warp == 0) ptx::gate_arrive(x_->done + k % gates);
    } else if (kind_ == Kind::notifier) {
      if (!passes(x_->done + k % gates, k / gates)) return;
      store_marks(n, mark, lane_, ptx::store_release);
      __syncwarp();
      if (lane_ == 0) ptx::gate_arrive(x_->told + k % gates);
    }
  }
  template <class F>
  __device__ void tell(int n, F mark) {
    if (kind_ == Kind::watcher) store_marks(n, mark, lane_, ptx::store_relaxed);
  }
  template <class F>
  __device__ void grant(int n, F line) {
    if (kind_ == Kind::watcher) store_grants(n, line, lane_, ptx::store_line);
  }
  template <class F>
  __device__ void keep(int n, F mark) {
    if (kind_ == Kind::watcher) store_marks(n, mark, lane_, keep_word);
  }
  template <class F>
  __device__ Arrival wait(int n, F mark, Where where) {
    return come([&] { return lane_ >= n || reached_by_call(l_, team_, mark(ptx::here(lane_)), lane_, where); });
  }
  template <class F>
  __device__ Arrival expect(int n, F mark, Where where) {
    return come([&] { return lane_ >= n || tagged_gently(l_, team_, mark(ptx::here(lane_)), lane_, where); });
  }
  __device__ void drain() const { ptx::barrier(1 + role_, role_threads); }

 private:
  template <class T, class F>
  __device__ bool add_pair(int places, T to, const Place& own, F slot, int self, Range range, Sum sum) {
    bool done = false;
    if constexpr (!std::is_same_v<Adding, AddsAny>)  // all of them in one kernel would need too much of a stack
      with_adds<Adding>(sum, [&](auto adds) {
        done =
            gpu::reduce_two<decltype(adds)>(to(0), places > 1 ? to(1) : Place{}, own, const_cast<char*>(slot(1 - self)),
                                            self, range, sum.op, {lane_, copiers});
      });
    return done;
  }
  // All copiers learn the same of each wait, for they come to barriers together or not at all. So the watcher opens every gate, whatever has failed, and copiers
  // pass each of them.
  template <class F>
  __device__ Arrival come(F arrived) {
    int k = waits_++;
    if (kind_ == Kind::watcher) return watch(k, arrived);
    if (kind_ == Kind::notifier) return has_failed() ? Arrival::never : Arrival::yes;
    pass(x_->go + k % gates, k / gates);
    bool came = x_->came[k % gates];
    __syncwarp();
    if (lane_ % warp == 0) ptx::gate_arrive(x_->passed + k % gates);
    return came ? Arrival::yes : Arrival::never;
  }
  template <class F>
  __device__ Arrival watch(int k, F arrived) {
    if (k >= gates) pass(x_->passed + k % gates, k / gates - 1);
    bool came = __all_sync(0xffffffffu, arrived());
    if (lane_ == 0) {
      x_->came[k % gates] = came;
      if (!came) *static_cast<volatile int*>(&x_->failed) = 1;
      ptx::gate_arrive(x_->go + k % gates);
    }
    __syncwarp();
    return came ? Arrival::yes : Arrival::never;
  }
  // Wait for the phase-th completion of a gate.
  __device__ void pass(ptx::Gate* gate, int phase) const {
    while (!ptx::gate_passed(gate, static_cast<unsigned>(phase) & 1)) {}
  }
  // The same of notifies, which nobody needs any more when something has failed: false.
  __device__ bool passes(ptx::Gate* gate, int phase) const {
    while (!ptx::gate_passed(gate, static_cast<unsigned>(phase) & 1))
      if (has_failed()) return false;
    return true;
  }
  __device__ bool has_failed() const { return *static_cast<volatile const int*>(&x_->failed) != 0; }
  __device__ int copier_barrier() const { return 3 + role_; }

  Kind kind_;
  int lane_;
  Crossing<copiers>* x_;
  int waits_ = 0, notifies_ = 0, reductions_ = 0;
};

}  // namespace purlin::gpu
