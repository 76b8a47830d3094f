// One rank's end of a communicator on the host, as plain C++: the bindings show it to Python, cpu.cpp runs calls on it.
#pragma once
#include "spec.hpp"

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace purlin {

struct RouteText {  // a route as planning writes it: lo, bytes, then per item {tensor, at, offset, run, dims, extents, strides}
  std::vector<i64> numbers;
};

struct PlanText {
  int kind, regime, op, dtype, rank, ranks, teams, lag, grants;
  unsigned signature;
  RouteText own_from, own_to;
  std::vector<RouteText> send, remote, receive;  // by peer: peer p is rank (rank + 1 + p) % ranks
  std::vector<i64> reach;
  std::vector<unsigned> send_signatures, receive_signatures;
  std::vector<i64> input_spans, output_spans;  // bytes from the first to the last byte of each tensor
  bool overlap_allowed;                        // input and output may share storage: one of the three forms, checked by planning
};

class Plan {
 public:
  Plan(const PlanText& text, const Geometry& geometry);
  Plan(const Plan&) = delete;  // its Call points into its items
  const Call& call() const { return call_; }
  bool overlaps(std::span<const std::uintptr_t> inputs, std::span<const std::uintptr_t> outputs) const;
  bool takes(std::size_t inputs, std::size_t outputs) const;

 private:
  Route route(const RouteText& text);
  void cut(Route& route, const Geometry& geometry) const;
  int steps() const;

  std::deque<std::vector<Item>> items_;
  std::vector<i64> input_spans_, output_spans_;
  bool overlap_allowed_;
  Call call_{};
};

// How a call ended on this rank. The numbers from `stall` on are those of cpu::Fault.
enum class Outcome { done = 0, stall, mismatch, grant, left, died, interrupted, overlap = 16, concurrent, bad_plan };

struct Fault {   // what killed the communicator
  int what, by, about;
};
struct Stalled {  // which wait of this rank failed; the last one
  int what, use, step, team, peer;
};

class Endpoint {
 public:
  Endpoint(int rank, const Geometry& geometry, std::vector<std::uintptr_t> arenas, double timeout_s, bool (*interrupted)());

  Outcome run(const Plan& plan, std::span<const std::uintptr_t> inputs, std::span<const std::uintptr_t> outputs);
  void abort(int fault, int about);
  void begin_at(Word message);  // before first use: messages and calls are counted from here
  Fault fault() const;          // what == 0: none
  Stalled stalled() const;
  Word calls() const { return progress_.calls; }
  Word post(int peer_rank) const;  // {calls : 40, signature : 24} as that rank last said
  const Geometry& geometry() const { return geometry_; }

 private:
  struct State;
  int rank_;
  Geometry geometry_;
  std::vector<char*> arenas_;
  std::vector<Counts> counts_;
  Progress progress_{1, 0};
  std::shared_ptr<State> state_;
  std::atomic_flag busy_;
};

Geometry cpu_geometry(int ranks, int teams, int slots, i64 slot_bytes, i64 window_bytes, i64 heap_bytes);

}  // namespace purlin
