// One rank's end of a communicator on the host, as plain C++: the bindings show it to Python, cpu.cpp runs calls on it.
#pragma once
#include "spec.hpp"
#include "trace.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace purlin {

struct
    RouteText {  // a route as planning writes it: lo, bytes, then per item {tensor, at, offset, run, dims, extents, strides}
  std::vector<i64> numbers;
};

struct PlanText {
  int kind, regime, op, dtype, rank, ranks, teams, parts, lag, grants;
  unsigned signature;
  RouteText own_from, own_to;
  std::vector<RouteText> send, remote, receive;  // by peer: peer p is rank (rank + 1 + p) % ranks
  std::vector<i64> reach;
  std::vector<unsigned> send_signatures, receive_signatures;
  std::vector<i64> input_spans, output_spans;  // bytes from the first to the last byte of each tensor
  bool overlap_allowed;  // input and output may share storage: one of the three forms, checked by planning
  bool onto_sent;  // a reduction writes where this rank reads what it sends: an all-reduce in one exchange, in place
};

// Where a call finds a plan's items, as long as the plan lives. Every Atom has its own: csrc/cpu.cpp, csrc/cuda/endpoint.cu.
std::shared_ptr<const Item> keep_items(const std::vector<Item>& items);

class Plan {
 public:
  Plan(const PlanText& text, const Geometry& geometry);
  const Call& call() const { return call_; }  // all but what is the endpoint's, and addresses of tensors
  bool overlaps(std::span<const std::uintptr_t> inputs, std::span<const std::uintptr_t> outputs) const;
  bool takes(std::size_t inputs, std::size_t outputs) const;

 private:
  Route route(const RouteText& text);
  void cut(Route& route, const Geometry& geometry) const;
  int steps() const;

  std::vector<Item> items_;
  std::shared_ptr<const Item> kept_;
  std::vector<i64> input_spans_, output_spans_;
  bool overlap_allowed_;
  Call call_{};
};

// How a call ended on this rank. The numbers below 16 are those of Fault.
enum class Outcome { done = 0, overlap = 16, concurrent, bad_plan };

struct Death {  // what killed the communicator; what == 0: nothing
  int what, by, about;
};
struct Stalled {  // which wait of this rank failed first
  int what, use, step, team, peer;
};

// Every Atom has its own: csrc/cpu.cpp, csrc/cuda/endpoint.cu. `stream` is a CUDA stream as an integer, nothing to the CPU.
class Endpoint {
 public:
  Endpoint(int rank, const Geometry& geometry, std::vector<std::uintptr_t> arenas, double timeout_s,
           bool (*interrupted)());
  ~Endpoint();

  Outcome run(const Plan& plan, std::span<const std::uintptr_t> inputs, std::span<const std::uintptr_t> outputs,
              std::uintptr_t stream);
  void abort(int fault, int about);
  void
  leave();  // tell the peers that no further call of this rank will come: those who wait for one fail, the others are not hurt
  void begin_at(Word message);  // before first use: messages and calls are counted from here
  Death death() const;
  Stalled stalled() const;
  Word calls() const;
  unsigned signature() const;      // of the call that failed; 0: unknown
  Word post(int peer_rank) const;  // {calls : 40, signature : 24} as that rank last said
  // Write down what calls do from now on; nullptr: no more. A call under way goes on with what it began with. A GPU's kernels write nothing.
  void record(std::shared_ptr<Trace> trace) {
    std::lock_guard hold(trace_mutex_);
    trace_ = std::move(trace);
    recorded_.store(trace_ != nullptr, std::memory_order_relaxed);
  }

 private:
  friend void fuse(const std::vector<Endpoint*>& ranks);
  struct State;
  std::shared_ptr<Trace> trace() {  // nullptr: nobody looks, and a call pays one load for it
    if (!recorded_.load(std::memory_order_relaxed)) return nullptr;
    std::lock_guard hold(trace_mutex_);
    return trace_;
  }

  std::unique_ptr<State> state_;
  std::mutex trace_mutex_;
  std::shared_ptr<Trace> trace_;
  std::atomic<bool> recorded_ = false;
};

// Ranks of one process: their calls are launched together, on one device as one kernel. Each rank still makes its own, from a thread of its own. Nothing to
// the CPU.
void fuse(const std::vector<Endpoint*>& ranks);

// Memory of the current device, zeroed, that ranks of this process may share.
class Memory {
 public:
  explicit Memory(std::size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(first_); }
  std::size_t bytes() const { return bytes_; }

 private:
  void* first_ = nullptr;
  std::size_t bytes_;
};
// Destructors leave memory of a GPU behind, for to give it back is to wait for the GPU (cuda/remains.hpp). Here it is given back.
void give_back();
bool can_reach(int device, int peer);
void reach(int peer);  // let the current device read and write memory of that one

// Memory of a packet window, tags included: how long a line is, is the Atom's own. csrc/cpu.cpp, csrc/cuda/endpoint.cu.
i64 stored_bytes(i64 window_bytes);
Geometry geometry_of(int ranks, int teams, int slots, i64 slot_bytes, i64 window_bytes, i64 heap_bytes);

}  // namespace purlin
