// Where the protocol and the CPU Atom meet: plans become Calls, and a call runs on the calling thread, team after team.
// (A team only ever waits for the same team of its peers, and every rank runs them in the same order, so one thread a rank is enough.)
#include "purlin/endpoint.hpp"

#include "purlin/atom/cpu.hpp"
#include "purlin/atom/traced.hpp"
#include "purlin/snac.hpp"

#include <cstdlib>
#include <new>

namespace purlin {
namespace {

static_assert(Atom<cpu::Cpu<>> && Atom<Traced<cpu::Cpu<>>>);

void run_traced(const Call& call, cpu::Host& host, Trace& trace) {
  for (int team = 0; team < call.teams; ++team) {
    cpu::Cpu<> atom(call, team, host);
    Traced<cpu::Cpu<>> traced(atom, call, trace);
    snac::run(traced, call);
  }
}

}  // namespace

i64 stored_bytes(i64 window_bytes) { return cpu::lines_of(window_bytes) * cpu::line_bytes; }

std::shared_ptr<const Item> keep_items(const std::vector<Item>& items) {
  return {std::shared_ptr<const Item>(), items.data()};
}

void fuse(const std::vector<Endpoint*>&) {}

struct Endpoint::State {
  int rank;
  Geometry geometry;
  std::vector<char*> arenas;  // by rank
  std::vector<Counts> counts;
  Progress progress{1, 0};
  cpu::Host host;
  std::atomic_flag busy;

  Inbox inbox() const { return {geometry, arenas[static_cast<std::size_t>(rank)]}; }
};

Endpoint::Endpoint(int rank, const Geometry& geometry, std::vector<std::uintptr_t> arenas, double timeout_s,
                   bool (*interrupted)())
    : state_(std::make_unique<State>()) {
  state_->rank = rank;
  state_->geometry = geometry;
  for (std::uintptr_t arena : arenas) state_->arenas.push_back(reinterpret_cast<char*>(arena));
  state_->counts.resize(static_cast<std::size_t>((geometry.ranks - 1) * geometry.teams));
  state_->host.timeout = std::chrono::nanoseconds(static_cast<i64>(timeout_s * 1e9));
  state_->host.interrupted = interrupted;
  begin_at(1);
}

Endpoint::~Endpoint() = default;

// Nothing that a first message could be taken for may lie in a slot: tags are those of the message before the first.
void Endpoint::begin_at(Word message) {
  const Geometry& g = state_->geometry;
  Inbox inbox = state_->inbox();
  state_->progress.calls = message;
  for (Counts& c : state_->counts)
    for (int use = 0; use < uses; ++use) c.sent[use] = c.taken[use] = message;
  Word stale = tag(message - 1, 0);
  for (int p = 0; p < g.ranks - 1; ++p) {
    *inbox.post(p) = stale;
    for (int t = 0; t < g.teams; ++t) {
      for (int s = 0; s < g.slots; ++s)
        for (Use use : {Use::ring, Use::gather, Use::direct}) *inbox.ready(p, t, use, static_cast<Word>(s)) = stale;
      for (int k = 0; k < max_grants; ++k) inbox.grants(p, t)[k].tag = stale;
      for (int use = 0; use < uses; ++use) *inbox.freed(p, t, static_cast<Use>(use)) = message;
      *inbox.home(p, t) = message;
      for (int s = 0; s < packet_slots; ++s)
        for (i64 at = 0; at < g.window_stored; at += cpu::line_bytes)
          *reinterpret_cast<Word*>(inbox.window(p, t, static_cast<Word>(s)) + at + cpu::payload_bytes) = stale;
    }
  }
}

Outcome Endpoint::run(const Plan& plan, std::span<const std::uintptr_t> inputs, std::span<const std::uintptr_t> outputs,
                      std::uintptr_t) {
  if (!plan.takes(inputs.size(), outputs.size())) return Outcome::bad_plan;
  if (plan.overlaps(inputs, outputs)) return Outcome::overlap;
  if (state_->busy.test_and_set(std::memory_order_acquire)) return Outcome::concurrent;
  Call call = plan.call();
  call.geometry = state_->geometry;
  std::copy(state_->arenas.begin(), state_->arenas.end(), call.arena);
  for (std::size_t i = 0; i < inputs.size(); ++i) call.input[i] = reinterpret_cast<char*>(inputs[i]);
  for (std::size_t o = 0; o < outputs.size(); ++o) call.output[o] = reinterpret_cast<char*>(outputs[o]);
  call.counts = state_->counts.data();
  call.counts_pitch = state_->geometry.teams;
  call.progress = &state_->progress;
  if (std::shared_ptr<Trace> trace = this->trace()) {
    run_traced(call, state_->host, *trace);
  } else {
    for (int team = 0; team < call.teams; ++team) {
      cpu::Cpu<> atom(call, team, state_->host);
      snac::run(atom, call);
    }
  }
  Outcome how = static_cast<Outcome>(death().what);
  state_->busy.clear(std::memory_order_release);
  return how;
}

void Endpoint::abort(int fault, int about) {
  for (char* arena : state_->arenas)
    cpu::poison(state_->geometry, arena, {static_cast<Fault>(fault), state_->rank, about});
}

void Endpoint::leave() {
  int ranks = state_->geometry.ranks;
  for (int p = 0; p < ranks - 1; ++p) {
    char* theirs = state_->arenas[static_cast<std::size_t>((state_->rank + 1 + p) % ranks)];
    cpu::shared(Inbox{state_->geometry, theirs}.post(ranks - 2 - p)).store(farewell, std::memory_order_release);
  }
}

Death Endpoint::death() const {
  Word word = cpu::shared(state_->inbox().poison()).load(std::memory_order_acquire);
  if (word == 0) return {0, 0, 0};
  Poison poison = decode(word);
  return {static_cast<int>(poison.fault), poison.by, poison.about};
}

Stalled Endpoint::stalled() const {
  const Record& r = state_->host.record;
  return {static_cast<int>(r.where.what), static_cast<int>(r.where.use), r.where.step, r.team, r.peer};
}

unsigned Endpoint::signature() const { return 0; }

Word Endpoint::calls() const { return state_->progress.calls; }

Word Endpoint::post(int peer_rank) const {
  int ranks = state_->geometry.ranks, peer = (peer_rank - state_->rank - 1 + ranks) % ranks;
  return cpu::shared(state_->inbox().post(peer)).load(std::memory_order_acquire);
}

Memory::Memory(std::size_t bytes) : first_(std::calloc(bytes, 1)), bytes_(bytes) {
  if (!first_) throw std::bad_alloc();
}
Memory::~Memory() { std::free(first_); }
void give_back() {}
bool can_reach(int, int) { return true; }
void reach(int) {}

}  // namespace purlin
