// What a block of threads knows of its call, how its lanes wait for words, and what they leave behind when a wait fails. Common to the CUDA Atoms.
#pragma once
#include "../fault.hpp"
#include "ptx.cuh"

namespace purlin::gpu {

constexpr int warp = 32, block_warps = 16, block_threads = block_warps * warp;  // of kernels whose lanes work together

// Pinned host memory of a rank. The device writes it when a call fails; the host reads it at every call.
struct Page {
  Word abort;  // set by the host: slow waits give up
  Word poison;
  Word calls;  // the number of the call that failed, and its signature
  Word signature;
  Record record;
};

// A kernel's argument. It is read where it lies, in constant memory: what is the same for all lanes of a warp costs nothing there.
struct Launch {
  Divider share;  // lanes of a role that serve one peer, where packets are sent
  Page* page;
  unsigned long long timeout;  // nanoseconds
  Call call;
};

struct Lanes {  // who works together: lane `lane` of `lanes`
  int lane, lanes;
};

// ---- failing

__device__ __forceinline__ Word* poison_of(const Call& c, int rank) {
  return Inbox{c.geometry, c.arena[rank]}.poison();
}
inline __device__ __noinline__ void tell_host(const Launch& l, Word poison) {
  if (ptx::load_relaxed(&l.page->poison) != 0) return;  // an earlier call has told
  ptx::store_relaxed(&l.page->calls, l.call.progress->calls);
  ptx::store_relaxed(&l.page->signature, l.call.signature);
  ptx::store_release(&l.page->poison, poison);
}
inline __device__ __noinline__ void fail(const Launch& l, int team, Fault fault, int peer, Where where) {
  const Call& c = l.call;
  int about = c.rank_of(peer);
  Word poison = encode({fault, fault == Fault::left ? about : c.rank, about});
  if (Word before = ptx::exchange(poison_of(c, c.rank), poison)) {
    poison = before;
  } else {
    l.page->record = {where, team, about};
    __threadfence_system();
    for (int r = 0; r < c.ranks; ++r)
      if (r != c.rank) ptx::exchange(poison_of(c, r), poison);
  }
  tell_host(l, poison);
}

// ---- waiting: 256 looks at the word, then at the clock and the words of failure after every 256

enum class Outlook {
  open,
  closed,
  doubtful
};  // doubtful: the peer is elsewhere; unless the word comes now it never will
struct Watch {
  Outlook outlook;
  Fault fault;
  unsigned long long start;  // nanoseconds; 0: not yet looked at the clock
};
inline __device__ __noinline__ Watch look_around(const Launch& l, int team, unsigned long long start, int peer,
                                                 Where where) {
  const Call& c = l.call;
  unsigned long long now = ptx::nanoseconds();
  if (start == 0) start = now;
  if (Word poison = ptx::load_relaxed(poison_of(c, c.rank)))
    return tell_host(l, poison), Watch{Outlook::closed, Fault::none, start};
  if (now - start > l.timeout)
    return fail(l, team, Fault::stall, peer, where), Watch{Outlook::closed, Fault::none, start};
  if (now - start > 1000000) {
    if (ptx::load_relaxed(&l.page->abort))
      return fail(l, team, Fault::left, peer, where), Watch{Outlook::closed, Fault::none, start};
    if (where.what == Where::What::home) return {Outlook::open, Fault::none, start};  // no peer is waited for
    Word post = ptx::load_acquire(Inbox{c.geometry, c.own_arena()}.post(peer));
    if (post == farewell) return {Outlook::doubtful, Fault::left, start};
    if (elsewhere(post, c.progress->calls, c.signature)) return {Outlook::doubtful, Fault::mismatch, start};
  }
  return {Outlook::open, Fault::none, start};
}

// One lane's wait for one peer.
class Wait {
 public:
  // Called after a look in vain. True: it is over, and has been told.
  template <class F>
  __device__ __forceinline__ bool hopeless(const Launch& l, int team, F come, int peer, Where where) {
    if (++looks_ & 255) return false;
    Watch watch = look_around(l, team, start_, peer, where);
    start_ = watch.start;
    if (watch.outlook == Outlook::open) return false;
    if (watch.outlook == Outlook::closed) return true;
    if (come()) return false;
    fail(l, team, watch.fault, peer, where);
    return true;
  }

 private:
  unsigned looks_ = 0;
  unsigned long long start_ = 0;
};
template <class F>
__device__ __forceinline__ bool until(const Launch& l, int team, F come, int peer, Where where) {
  Wait wait;
#pragma unroll 1
  while (!come())
    if (wait.hopeless(l, team, come, peer, where)) return false;
  return true;
}

// ---- what wait and expect look for, of one peer

struct Sought {
  Mark mark;
  ptx::Line found;  // its tag is what was found; a grant's payload is its place

  __device__ __forceinline__ bool has_reached() {
    return !mark.word || (found.tag = ptx::load_acquire(mark.word)) >= mark.value;
  }
  __device__ __forceinline__ bool has_number(Where where) {
    if (!mark.word) return true;
    if (where.what == Where::What::grant) {
      found = ptx::load_line_acquire(mark.word - 1);
    } else {
      found.tag = ptx::load_acquire(mark.word);
    }
    return number_of(found.tag) == number_of(mark.value);
  }
  // Once it has the number: is it what was agreed on?
  __device__ __forceinline__ bool is_agreed(const Launch& l, int team, int peer, Where where) const {
    if (!mark.word) return true;
    if (found.tag != mark.value) return fail(l, team, Fault::mismatch, peer, where), false;
    if (where.what != Where::What::grant) return true;
    i64 place = static_cast<i64>(found.payload);
    const Call& c = l.call;
    if (place >= c.geometry.heap_at && place <= c.geometry.arena_bytes - c.pair[peer].reach) return true;
    return fail(l, team, Fault::grant, peer, where), false;
  }
};
__device__ __forceinline__ bool reached(const Launch& l, int team, Mark mark, int peer, Where where) {
  Sought sought{mark, {}};
  return until(l, team, [&] { return sought.has_reached(); }, peer, where);
}
__device__ __forceinline__ bool tagged(const Launch& l, int team, Mark mark, int peer, Where where) {
  Sought sought{mark, {}};
  return until(
             l, team, [&] { return sought.has_number(where); }, peer, where) &&
         sought.is_agreed(l, team, peer, where);
}

// The same for those who wait ahead of others: they look without acquiring, which empties the cache of all, and acquire once.
__device__ __forceinline__ bool reached_gently(const Launch& l, int team, Mark mark, int peer, Where where,
                                               Word& seen) {
  if (!mark.word) return true;
  if (!until(l, team, [&] { return ptx::load_relaxed(mark.word) >= mark.value; }, peer, where)) return false;
  seen = ptx::load_acquire(mark.word);
  return true;
}
// Out of line, for kernels of sums that wait at several places: each copy of it took 90 bytes of a stack that has 1 KiB.
inline __device__ __noinline__ bool reached_by_call(const Launch& l, int team, Mark mark, int peer, Where where) {
  Word seen;
  return reached_gently(l, team, mark, peer, where, seen);
}
__device__ __forceinline__ bool tagged_gently(const Launch& l, int team, Mark mark, int peer, Where where) {
  if (!mark.word) return true;
  auto come = [&] { return number_of(ptx::load_relaxed(mark.word)) == number_of(mark.value); };
  return until(l, team, come, peer, where) && tagged(l, team, mark, peer, where);
}

// One role of a block that plays its two roles side by side.
template <class R>
__device__ __forceinline__ void play(R& role) {
  role.open();
  int steps = role.steps();
#pragma unroll 1
  for (int i = 0; i < steps; ++i) role.step(i);
  role.a.drain();
  role.close();
}

// What an Atom of calls without packets never does.
struct NoPackets {
  template <class C, class F, class G>
  __device__ Arrival put(int, C, F, G, Where) {
    return Arrival::yes;
  }
  template <class F>
  __device__ Arrival take(int, F, Where) {
    return Arrival::yes;
  }
  template <class F>
  __device__ Arrival take_reduce(const Place&, const Place&, int, F, int, Sum, Where) {
    return Arrival::yes;
  }
};

// Two roles of one crew, the second `lag` steps behind.
template <class G, class C>
__device__ __forceinline__ void play_in_turn(int lag, G& second, C& first) {
  first.open();
  second.open();
  int steps = larger(first.steps(), second.steps() + lag);
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    if (i < first.steps()) first.step(i);
    if (i >= lag) second.step(i - lag);
  }
  first.a.drain();
  first.close();
  second.close();
}

// ---- what all forms do alike: one lane a peer

template <class F>
__device__ __forceinline__ void store_marks(int n, F mark, int lane, void (*store)(Word*, Word)) {
  if (lane < 0 || lane >= n) return;
  Mark m = mark(ptx::here(lane));
  if (m.word) store(m.word, m.value);
}
template <class F>
__device__ __forceinline__ void store_grants(int n, F line, int lane, void (*store)(void*, ptx::Line)) {
  if (lane < 0 || lane >= n) return;
  GrantMark m = line(ptx::here(lane));
  if (m.line) store(m.line, {m.value.place, m.value.tag});
}
__device__ __forceinline__ void keep_word(Word* word, Word value) { *word = value; }

}  // namespace purlin::gpu
