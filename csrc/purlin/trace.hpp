// What a rank did and when: a bounded ring of events in ordinary memory, written by a traced Atom, read when the trace ends.
// The newest events stay; those that had to make room are counted.
#pragma once
#include "channel.hpp"

#include <mutex>
#include <vector>

namespace purlin {

struct Event {
  // come: within a consume of several peers, which it has the times of, this peer's message was there
  enum class What { stage, notify, wait, expect, consume, come, let_go, grant, own } what;
  enum class Role { consume, stage } role;  // of the two of a team
  Use use;
  int team, step;
  int peer;      // a rank; -1: all, or none
  Word call;     // as the rank counts its calls
  Word message;  // as the channel counts; of a wait for credit: the count it waits for; 0 where there is no one message
  i64 bytes;     // of wire that were copied or added
  i64 begin, end;  // nanoseconds of the machine's monotonic clock
};

class Trace {
 public:
  explicit Trace(std::size_t most) : ring_(most) {}

  void add(const Event& event) {
    std::lock_guard hold(mutex_);
    ring_[seen_++ % ring_.size()] = event;
  }
  // In the order in which they ended.
  std::vector<Event> events() const {
    std::lock_guard hold(mutex_);
    std::vector<Event> out;
    for (std::size_t i = seen_ > ring_.size() ? seen_ - ring_.size() : 0; i < seen_; ++i)
      out.push_back(ring_[i % ring_.size()]);
    return out;
  }
  std::size_t lost() const {
    std::lock_guard hold(mutex_);
    return seen_ > ring_.size() ? seen_ - ring_.size() : 0;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Event> ring_;
  std::size_t seen_ = 0;
};

}  // namespace purlin
