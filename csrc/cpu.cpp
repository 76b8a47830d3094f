// Where the protocol and the CPU Atom meet: plans become Calls, and a call runs on the calling thread, team after team.
// (A team only ever waits for the same team of its peers, and every rank runs them in the same order, so one thread a rank is enough.)
#include "purlin/endpoint.hpp"

#include "purlin/atom/cpu.hpp"
#include "purlin/snac.hpp"

#include <cmath>
#include <stdexcept>

namespace purlin {

Geometry cpu_geometry(int ranks, int teams, int slots, i64 slot_bytes, i64 window_bytes, i64 heap_bytes) {
  Geometry g{};
  g.ranks = ranks;
  g.teams = teams;
  g.slots = slots;
  g.slot_bytes = slot_bytes;
  g.window_bytes = window_bytes;
  g.window_stored = cpu::lines_of(window_bytes) * cpu::line_bytes;
  g.heap_bytes = heap_bytes;
  return lay_out(g);
}

// ---- plans -----------------------------------------------------------------------------------------------------------------------------------------------

Plan::Plan(const PlanText& text, const Geometry& geometry)
    : input_spans_(text.input_spans), output_spans_(text.output_spans), overlap_allowed_(text.overlap_allowed) {
  call_.kind = static_cast<Kind>(text.kind);
  call_.regime = static_cast<Regime>(text.regime);
  call_.sum = {static_cast<Op>(text.op), static_cast<Dtype>(text.dtype)};
  call_.rank = text.rank;
  call_.ranks = text.ranks;
  call_.teams = text.teams;
  call_.lag = text.lag;
  call_.grants = text.grants;
  call_.signature = text.signature;
  call_.own_from = route(text.own_from);
  call_.own_to = route(text.own_to);
  for (std::size_t p = 0; p < text.send.size(); ++p) {
    Pair& pair = call_.pair[p];
    pair.send = route(text.send[p]);
    pair.remote = route(text.remote[p]);
    pair.receive = route(text.receive[p]);
    pair.reach = text.reach[p];
    pair.send_signature = text.send_signatures[p];
    pair.receive_signature = text.receive_signatures[p];
  }
  cut(call_.own_from, geometry);
  cut(call_.own_to, geometry);
  for (int p = 0; p < call_.peers(); ++p) {
    for (Route* r : {&call_.pair[p].send, &call_.pair[p].remote, &call_.pair[p].receive}) cut(*r, geometry);
    if (call_.regime == Regime::packet && larger(call_.pair[p].send.bytes, call_.pair[p].receive.bytes) > geometry.window_bytes * call_.teams)
      throw std::invalid_argument("a message of a packet call is larger than its window");
  }
  call_.steps = steps();
}

Route Plan::route(const RouteText& text) {
  const std::vector<i64>& n = text.numbers;
  std::vector<Item>& items = items_.emplace_back();
  for (std::size_t i = 2; i < n.size();) {
    Item item{};
    item.box.tensor = static_cast<int>(n[i]);
    item.at = n[i + 1];
    item.box.offset = n[i + 2];
    item.box.run = item.bytes = n[i + 3];
    item.box.dims = static_cast<int>(n[i + 4]);
    i += 5;
    for (int d = 0; d < item.box.dims; ++d) {
      item.box.extent[d] = n[i + static_cast<std::size_t>(d)];
      item.box.stride[d] = n[i + static_cast<std::size_t>(item.box.dims + d)];
      item.bytes *= item.box.extent[d];
    }
    i += 2 * static_cast<std::size_t>(item.box.dims);
    items.push_back(item);
  }
  return {items.data(), static_cast<int>(items.size()), n[0], n[1], 0};
}

// Every chunk is a multiple of 16 bytes of wire, the same for source and reader: it follows from the bytes of the pair alone.
void Plan::cut(Route& route, const Geometry& geometry) const {
  i64 even = round_up(larger<i64>(ceil_div(route.bytes, call_.teams), 16), 16);
  route.chunk = call_.regime == Regime::staged ? smaller(even, geometry.slot_bytes) : even;
}

int Plan::steps() const {
  int most = call_.own_from.messages(0, call_.teams);
  for (int p = 0; p < call_.peers(); ++p)
    most = larger(most, larger(call_.pair[p].send.messages(0, call_.teams), call_.pair[p].receive.messages(0, call_.teams)));
  return most;
}

bool Plan::takes(std::size_t inputs, std::size_t outputs) const {
  return inputs == input_spans_.size() && outputs == output_spans_.size() && inputs <= max_tensors && outputs <= max_tensors;
}

bool Plan::overlaps(std::span<const std::uintptr_t> inputs, std::span<const std::uintptr_t> outputs) const {
  if (overlap_allowed_) return false;
  auto meet = [](std::uintptr_t a, i64 a_bytes, std::uintptr_t b, i64 b_bytes) {
    return a_bytes > 0 && b_bytes > 0 && a < b + static_cast<std::uintptr_t>(b_bytes) && b < a + static_cast<std::uintptr_t>(a_bytes);
  };
  for (std::size_t o = 0; o < outputs.size(); ++o) {
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (meet(outputs[o], output_spans_[o], inputs[i], input_spans_[i])) return true;
    for (std::size_t other = 0; other < o; ++other)
      if (meet(outputs[o], output_spans_[o], outputs[other], output_spans_[other])) return true;
  }
  return false;
}

// ---- the end of a communicator ----------------------------------------------------------------------------------------------------------------------------

struct Endpoint::State {
  cpu::Host host;
};

Endpoint::Endpoint(int rank, const Geometry& geometry, std::vector<std::uintptr_t> arenas, double timeout_s, bool (*interrupted)())
    : rank_(rank), geometry_(geometry), state_(std::make_shared<State>()) {
  for (std::uintptr_t arena : arenas) arenas_.push_back(reinterpret_cast<char*>(arena));
  counts_.resize(static_cast<std::size_t>((geometry.ranks - 1) * geometry.teams));
  state_->host.timeout = std::chrono::nanoseconds(static_cast<i64>(timeout_s * 1e9));
  state_->host.interrupted = interrupted;
  begin_at(1);
}

// Nothing that a first message could be taken for may lie in a slot: tags are those of the message before the first.
void Endpoint::begin_at(Word message) {
  Inbox inbox{geometry_, arenas_[static_cast<std::size_t>(rank_)]};
  progress_.calls = message;
  for (Counts& c : counts_)
    for (int use = 0; use < uses; ++use) c.sent[use] = c.taken[use] = message;
  Word stale = tag(message - 1, 0);
  for (int p = 0; p < geometry_.ranks - 1; ++p) {
    *inbox.post(p) = stale;
    for (int t = 0; t < geometry_.teams; ++t) {
      for (int s = 0; s < geometry_.slots; ++s)
        for (Use use : {Use::ring, Use::gather, Use::direct}) *inbox.ready(p, t, use, static_cast<Word>(s)) = stale;
      for (int k = 0; k < max_grants; ++k) inbox.grants(p, t)[k].tag = stale;
      for (int use = 0; use < uses; ++use) *inbox.freed(p, t, static_cast<Use>(use)) = message;
      for (int s = 0; s < packet_slots; ++s)
        for (i64 at = 0; at < geometry_.window_stored; at += cpu::line_bytes)
          *reinterpret_cast<Word*>(inbox.window(p, t, static_cast<Word>(s)) + at + cpu::payload_bytes) = stale;
    }
  }
}

Outcome Endpoint::run(const Plan& plan, std::span<const std::uintptr_t> inputs, std::span<const std::uintptr_t> outputs) {
  if (!plan.takes(inputs.size(), outputs.size())) return Outcome::bad_plan;
  if (plan.overlaps(inputs, outputs)) return Outcome::overlap;
  if (busy_.test_and_set(std::memory_order_acquire)) return Outcome::concurrent;
  Call call = plan.call();
  call.geometry = geometry_;
  for (std::size_t r = 0; r < arenas_.size(); ++r) call.arena[r] = arenas_[r];
  for (std::size_t i = 0; i < inputs.size(); ++i) call.input[i] = reinterpret_cast<char*>(inputs[i]);
  for (std::size_t o = 0; o < outputs.size(); ++o) call.output[o] = reinterpret_cast<char*>(outputs[o]);
  call.counts = counts_.data();
  call.progress = &progress_;
  for (int team = 0; team < call.teams; ++team) {
    cpu::Cpu<> atom(call, team, state_->host);
    snac::run(atom, call);
  }
  Fault how = fault();
  busy_.clear(std::memory_order_release);
  return static_cast<Outcome>(how.what);
}

void Endpoint::abort(int fault, int about) {
  for (char* arena : arenas_) cpu::poison(geometry_, arena, {static_cast<cpu::Fault>(fault), rank_, about});
}

Fault Endpoint::fault() const {
  Word word = cpu::shared(Inbox{geometry_, arenas_[static_cast<std::size_t>(rank_)]}.poison()).load(std::memory_order_acquire);
  if (word == 0) return {0, 0, 0};
  cpu::Poison poison = cpu::decode(word);
  return {static_cast<int>(poison.fault), poison.by, poison.about};
}

Stalled Endpoint::stalled() const {
  const cpu::Record& r = state_->host.record;
  return {static_cast<int>(r.where.what), static_cast<int>(r.where.use), r.where.step, r.team, r.peer};
}

Word Endpoint::post(int peer_rank) const {
  int peer = (peer_rank - rank_ - 1 + geometry_.ranks) % geometry_.ranks;
  return cpu::shared(Inbox{geometry_, arenas_[static_cast<std::size_t>(rank_)]}.post(peer)).load(std::memory_order_acquire);
}

}  // namespace purlin
