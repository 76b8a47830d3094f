// A test world: arenas, private memory and counts of some ranks in one block, with canaries in every byte that belongs to nobody.
#pragma once
#include "arena.hpp"
#include "plan.hpp"

#include <new>

namespace purlin::test {

struct Lines {  // how an Atom lays out packets: payload, then tag
  i64 payload, bytes;
};

struct Setting {
  Limits limits;
  Word start;  // the first message and call number
  Lines lines;
};

class World {
 public:
  World(const Setting& setting, const std::vector<std::unique_ptr<Built>>& plans) : s_(setting), plans_(plans) {
    Geometry g{};
    g.ranks = s_.limits.ranks;
    g.teams = s_.limits.teams;
    g.slots = s_.limits.slots;
    g.slot_bytes = static_cast<int>(s_.limits.slot_bytes);
    g.window_bytes = static_cast<int>(s_.limits.window_bytes);
    g.window_stored = static_cast<int>(ceil_div(s_.limits.window_bytes, s_.lines.payload) * s_.lines.bytes);
    i64 own = 0;
    for (const auto& plan : plans)
      for (const Part& p : plan->part) {
        g.heap_bytes = larger(g.heap_bytes, p.heap_bytes);
        own = larger(own, p.own_bytes);
      }
    geometry_ = lay_out(g);
    rank_bytes_ = round_up(geometry_.arena_bytes + own, line);
    own_bytes_ = rank_bytes_ - geometry_.arena_bytes;
    block_.resize(static_cast<size_t>(rank_bytes_ * g.ranks / line));
    std::memset(first(), canary, static_cast<size_t>(bytes()));
    counts_.resize(static_cast<size_t>(g.ranks));
    progress_.resize(static_cast<size_t>(g.ranks));
    arena_ = arena_of(geometry_);
    i64 longest = larger(geometry_.heap_bytes, own_bytes_);
    for (Range r : arena_.unused) longest = larger(longest, r.hi - r.lo);
    blank_.assign(static_cast<size_t>(longest), canary);
    for (int r = 0; r < g.ranks; ++r) begin(r);
  }

  char* first() { return block_[0].bytes; }
  i64 bytes() const { return rank_bytes_ * s_.limits.ranks; }
  char* arena(int rank) { return first() + rank * rank_bytes_; }
  const Setting& setting() const { return s_; }
  const Shape& shape(int plan) const { return plans_[static_cast<size_t>(plan)]->shape; }

  Call call(int plan, int rank) {
    const Part& p = part(plan, rank);
    Call c = p.call;
    c.geometry = geometry_;
    for (int r = 0; r < s_.limits.ranks; ++r) c.arena[r] = arena(r);
    c.counts = counts_[static_cast<size_t>(rank)].data();
    c.counts_pitch = geometry_.teams;
    c.progress = &progress_[static_cast<size_t>(rank)];
    for (size_t k = 0; k < p.inputs.size(); ++k) c.input[k] = at(rank, p.regions[static_cast<size_t>(p.inputs[k])]);
    for (size_t k = 0; k < p.outputs.size(); ++k) c.output[k] = at(rank, p.regions[static_cast<size_t>(p.outputs[k])]);
    return c;
  }
  // touch(where, bytes) for every tensor of a call
  template <class F>
  void each_region(int plan, int rank, F touch) {
    for (const Region& r : part(plan, rank).regions) touch(at(rank, r), static_cast<i64>(r.before.size()));
  }
  void prepare(int plan, int rank) {
    for (const Region& r : part(plan, rank).regions) std::memcpy(at(rank, r), r.before.data(), r.before.size());
  }
  // What is not as it must be; empty when all is well.
  std::string check(int plan, int rank) {
    std::string wrong;
    for (const Region& r : part(plan, rank).regions) {
      if (std::memcmp(at(rank, r), r.after.data(), r.after.size())) wrong = "wrong data";
      std::memset(at(rank, r), canary, r.after.size());
    }
    if (!wrong.empty()) return wrong;
    if (std::memcmp(arena(rank) + geometry_.heap_at, blank_.data(), static_cast<size_t>(geometry_.heap_bytes)))
      return "the heap is written outside the outputs";
    if (std::memcmp(arena(rank) + geometry_.arena_bytes, blank_.data(), static_cast<size_t>(own_bytes_)))
      return "memory is written outside the outputs";
    return canaries(rank);
  }
  std::string canaries(int rank) {
    for (Range r : arena_.unused)
      if (std::memcmp(arena(rank) + r.lo, blank_.data(), static_cast<size_t>(r.hi - r.lo)))
        return "a canary of the arena is dead";
    return "";
  }
  std::string name_of(const void* word) {
    i64 offset = static_cast<const char*>(word) - first();
    if (offset < 0 || offset >= bytes()) return "?";
    std::string owner = "rank " + std::to_string(offset / rank_bytes_) + "'s ";
    for (const auto& [range, name] : arena_.used)
      if (offset % rank_bytes_ >= range.lo && offset % rank_bytes_ < range.hi) return owner + name;
    return owner + "?";
  }
  const std::vector<std::pair<Range, std::string>>& names() const { return arena_.used; }
  const Geometry& geometry() const { return geometry_; }

 private:
  struct alignas(line) Line {
    char bytes[line];
  };

  const Part& part(int plan, int rank) const {
    return plans_[static_cast<size_t>(plan)]->part[static_cast<size_t>(rank)];
  }
  char* at(int rank, const Region& r) {
    return arena(rank) + (r.area == Area::heap ? geometry_.heap_at : geometry_.arena_bytes) + r.at;
  }

  // Nothing that a first message could be taken for may lie in a slot: tags are those of the message before the first.
  void begin(int rank) {
    Inbox in{geometry_, arena(rank)};
    Word stale = tag(s_.start - 1, 0x5c5c5c);
    counts_[static_cast<size_t>(rank)].resize(static_cast<size_t>((s_.limits.ranks - 1) * s_.limits.teams));
    for (Counts& c : counts_[static_cast<size_t>(rank)])
      for (int u = 0; u < uses; ++u) c.sent[u] = c.taken[u] = s_.start;
    progress_[static_cast<size_t>(rank)] = {s_.start, 0};
    *in.poison() = 0;
    for (int p = 0; p < s_.limits.ranks - 1; ++p) {
      *in.post(p) = stale;
      for (int t = 0; t < s_.limits.teams; ++t) {
        for (int s = 0; s < s_.limits.slots; ++s)
          for (Use u : {Use::ring, Use::gather}) *in.ready(p, t, u, static_cast<Word>(s)) = stale;
        *in.ready(p, t, Use::direct, 0) = stale;
        for (int k = 0; k < max_grants; ++k) in.grants(p, t)[k].tag = stale;
        for (int u = 0; u < uses; ++u) *in.freed(p, t, static_cast<Use>(u)) = s_.start;
        *in.home(p, t) = s_.start;
        for (int s = 0; s < packet_slots; ++s)
          for (i64 at = 0; at < geometry_.window_stored; at += s_.lines.bytes)
            *reinterpret_cast<Word*>(in.window(p, t, static_cast<Word>(s)) + at + s_.lines.payload) = stale;
      }
    }
  }

  const Setting s_;
  const std::vector<std::unique_ptr<Built>>& plans_;
  Geometry geometry_{};
  i64 rank_bytes_ = 0, own_bytes_ = 0;
  std::vector<Line> block_;
  std::vector<std::vector<Counts>> counts_;
  std::vector<Progress> progress_;
  Arena arena_;
  std::vector<char> blank_;
};

// ---- schedules ----------------------------------------------------------------------------------------------------------------------------------------------

inline Setting draw_setting(Random& random, int ranks, Lines lines) {
  static const Word starts[] = {1, (1ull << 32) - 3, (1ull << 40) - 3};
  Limits limits{ranks, static_cast<int>(random.between(1, 3)), static_cast<int>(random.between(1, 4)),
                16 * random.between(1, 4), 16 * random.between(1, 5)};
  return {limits, starts[random.below(3)] + static_cast<Word>(random.below(3)), lines};
}

}  // namespace purlin::test
