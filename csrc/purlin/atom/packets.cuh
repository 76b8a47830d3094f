// Packets: half of a block stages and half consumes, side by side. At these sizes latency is made of what each lane looks up on its way, and so whoever waits
// for a packet has all of it at hand before the packet comes.
#pragma once
#include "lines.cuh"

namespace purlin::gpu {

constexpr int crew = block_threads / 2;  // lanes of a role
// Of a role, that serve one peer. Any count will do that leaves every peer some.
constexpr int lanes_of(int peers) { return crew / larger(1, peers) & ~15; }
static_assert(lanes_of(max_ranks - 1) >= 16);
constexpr i64 little = i64{warp} * in_flight * vector_bytes;  // that a warp copies in one round

template <bool all_flat, class Adding = Copies>
class Packets {
 public:
  static constexpr bool flat = all_flat;

  __device__ Packets(const Launch& launch, int team, Incoming* incoming)
      : l_(launch),
        team_(team),
        incoming_(incoming),
        consumes_(threadIdx.x < crew),
        lane_(static_cast<int>(threadIdx.x) % crew) {}

  __device__ int team() const { return team_; }
  __device__ int teams() const { return l_.call.teams; }
  // All that memory knows is asked for at once, and waited for where it is used: a dead communicator is noticed behind that.
  __device__ bool enter() {
    const Call& c = l_.call;
    poison_ = ptx::load_relaxed(poison_of(c, c.rank));
    if (int p = share().peer; p < c.peers()) served_ = load(p);
    if (int p = lane_ % warp; p < c.peers()) looked_ = load(p);
    return true;
  }
  // By the warp that has told of this call's number.
  __device__ void leave() const {
    __syncwarp();
    if (consumes_ && lane_ == warp && team_ == 0) atomicAdd(&l_.call.progress->calls, Word{1});  // nobody waits for it
  }
  // Asked by lane p of a warp for peer p, and by the lanes that serve the peer; each role for what it counts.
  __device__ Word sent(Use, int peer) const { return either(peer); }
  __device__ Word taken(Use, int peer) const { return either(peer); }

  template <class C, class S>
  __device__ void both(int, C consume, S stage) {
    if (consumes_) {
      play(consume);
      if (awaits_) come_together();
    } else {
      play(stage);
    }
  }
  // What is little is copied by one warp that has nothing else to do, and all others pass by.
  __device__ void copy(const Place& to, const Place& from, Range range) {
    Lanes who{crew - 1 - lane_, crew};
    if (range.hi - range.lo <= little) who = {lane_ - from_last(3), warp};
    if (who.lane >= 0 && who.lane < who.lanes) gpu::copy(to, from, range, who);
  }

  // Peers share the lanes: a lane serves one peer, all peers are served at once.
  template <class C, class F, class G>
  __device__ Arrival put(int n, C credit, F source, G window, Where where) {
    int judge = lane_ - from_last(1);  // of the warp that has the least to read
    bool judges = judge >= 0 && judge < n;
    Mark due = judges ? credit(ptx::here(judge)) : Mark{};
    Word paid = due.word ? ptx::load_acquire(due.word) : 0;
    Share mine = share();
    Bytes out = mine.peer < n ? source(ptx::here(mine.peer)) : Bytes{};
    Lines to = mine.peer < n ? window(ptx::here(mine.peer)) : Lines{};
    int bytes = static_cast<int>(out.range.hi - out.range.lo);
    Stretch from{nullptr, out.place.first + out.range.lo};
    bool one = flat || out.place.flat(), even = (bits(from.first) & (payload_bytes - 1)) == 0;
    Ahead held;
    if (one) read_ahead(held, from, even, bytes, mine.lanes);
    bool bad = due.word && paid < due.value && !reached(l_, team_, due, judge, where);
    if (ptx::barrier_or(stages_alone, crew, bad || is_dead())) return Arrival::never;
    if (bytes <= 0) return Arrival::yes;
    if (one) {
      put_flat(held, from, even, bytes, to, mine.lanes);
    } else {
      put_boxes(out, to, mine.lanes);
    }
    return Arrival::yes;
  }
  template <class F>
  __device__ Arrival take(int n, F packet, Where where) {
    Share mine = share();
    if (mine.peer >= n) return Arrival::yes;
    Packet in = packet(mine.peer);
    if (in.range.empty()) return Arrival::yes;
    if (is_dead()) return Arrival::never;
    bool came;
    if (flat || in.place.flat()) {
      Stretch to{nullptr, in.place.first + in.range.lo};
      came = take_stretch(l_, team_, to, 0, static_cast<int>(in.range.hi - in.range.lo), in.window, in.tag, mine.peer,
                          where, mine.lanes);
    } else {
      came = take_boxes(l_, team_, in, mine.peer, where, mine.lanes);
    }
    return came ? Arrival::yes : Arrival::never;
  }
  template <class F>
  __device__ Arrival take_reduce(const Place& to, const Place& own, int n, F packet, int self, Sum sum, Where where) {
    bool two = n == 2 && (flat || (to.flat() && own.flat()));
    Packet in = two ? packet(1 - self) : Packet{};
    if (!two && lane_ < n - 1) {
      int k = l_.call.rank_of(lane_);
      Packet each = packet(k);
      incoming_->window[k] = each.window;
      incoming_->tag[k] = each.tag;
    }
    Range all = packet(self).range;
    come_together();
    if (is_dead()) return Arrival::never;
    bool came = true;
    with_adds<Adding>(sum, [&](auto adds) {
      using Adds = decltype(adds);
      came = two ? take_add<Adds>(l_, team_, to.first + all.lo, own.first + all.lo, static_cast<int>(all.hi - all.lo),
                                  in, self == 0, sum.op, where, {lane_, crew})
                 : gpu::take_reduce<Adds>(l_, team_, to, own, n, *incoming_, self, all, sum.op, where, {lane_, crew});
    });
    return came ? Arrival::yes : Arrival::never;
  }
  // What nobody here waits for is told by the second warp, while the first waits for others.
  template <class F>
  __device__ void tell(int n, F mark) {
    store_marks(n, mark, lane_ - warp, ptx::store_relaxed);
  }
  template <class F>
  __device__ void keep(int n, F mark) {
    store_marks(n, mark, lane_ - from_last(2), keep_word);
  }
  // Whoever stages goes on; whoever consumes comes to it where it is about to write.
  __device__ void meet() {
    if (consumes_) {
      awaits_ = true;
    } else {
      ptx::barrier_arrive(both_roles, block_threads);
    }
  }
  __device__ void drain() const {}  // each step ends by itself

  // Rings and direct calls: other Atoms.
  __device__ void ahead(const Place&, Range) const {}
  template <class G, class C, class S>
  __device__ void three(int, G, C, S) {}
  template <class T, class F>
  __device__ void reduce(int, T, const Place&, int, F, int, Range, Sum) {}
  template <class F>
  __device__ void notify(int, F) {}
  template <class F>
  __device__ void lend(int, F) {}
  template <class F>
  __device__ void grant(int, F) {}
  template <class F>
  __device__ Arrival wait(int, F, Where) {
    return Arrival::yes;
  }
  template <class F>
  __device__ Arrival expect(int, F, Where) {
    return Arrival::yes;
  }

 private:
  enum Barrier { stages_alone = 1, both_roles };

  // By value: a choice between two places would put both in memory.
  __device__ Word either(int peer) const { return peer == lane_ % warp ? looked_ : served_; }
  __device__ Word load(int peer) const {
    Counts& count = l_.call.count(peer, team_);
    return consumes_ ? *count.taken_on(Use::packet) : *count.sent_on(Use::packet);
  }
  struct Share {  // the peer that this lane serves, and with whom; none when there are fewer peers than that
    int peer;
    Lanes lanes;
  };
  __device__ Share share() const {
    int each = static_cast<int>(l_.share.divisor),
        peer = static_cast<int>(l_.share.divide(static_cast<unsigned>(lane_)));
    return {peer, {lane_ - peer * each, each}};
  }
  __device__ bool is_dead() const {
    if (poison_ != 0) tell_host(l_, poison_);
    return poison_ != 0;
  }
  __device__ void come_together() {
    awaits_ = false;
    ptx::barrier(both_roles, block_threads);
  }
  // The first lane of a warp of this crew, the last one being the first from there.
  __device__ static int from_last(int warps) { return crew - warps * warp; }

  const Launch& l_;
  int team_;
  Incoming* incoming_;
  bool consumes_;
  int lane_;
  Word poison_ = 0;
  bool awaits_ = false;
  Word served_ = 0, looked_ = 0;
};

}  // namespace purlin::gpu
