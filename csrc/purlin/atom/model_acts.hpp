// What the operations of the model Atom are made of: words that are published and waited for, lines of packets, sums; of one team of a rank in a call.
#pragma once
#include "../fault.hpp"
#include "../numeric.hpp"
#include "concept.hpp"
#include "machine.hpp"

namespace purlin::model {

constexpr i64 payload_bytes = 8, line_bytes = 16;  // a packet line: payload, then tag

enum class Roles {
  lockstep,
  side_by_side,
  in_turn
};  // in_turn: those that consume are one crew, beside the one that stages
constexpr int roles_a_team = 3;

struct Rank {   // what a rank keeps from call to call
  Clock start;  // known at the entry of the call that runs
  Clock host;   // known after it
  std::uint32_t tick = 0;
  int actor = 0;
  std::vector<Role> roles;  // [team * roles_a_team + which]: source, reader, gatherer
  long poisoned_at = -1;    // the turn from which it sees that some rank has given up
  std::string fault;        // the first of its own
};

class Acts {
 protected:
  Acts(Machine& machine, std::vector<Rank>& ranks, const Call& call, int team, Roles roles)
      : m_(machine), ranks_(ranks), c_(call), team_(team), roles_(roles) {}

  struct Waited {
    int peer;
    Word* word;
    Word wanted;
    bool come = false;
    Word has = 0, payload = 0;
  };
  struct Incoming {
    int peer;
    Packet packet;
    std::vector<Word> payload;  // of its lines, once they have come

    i64 lines() const { return ceil_div(packet.range.hi - packet.range.lo, payload_bytes); }
    const char* bytes() const { return reinterpret_cast<const char*>(payload.data()); }
  };
  static Word* tag_of(const Packet& packet, i64 line) {
    return reinterpret_cast<Word*>(packet.window + line * line_bytes + payload_bytes);
  }

  Rank& rank() { return ranks_[static_cast<size_t>(c_.rank)]; }
  Role& of_team(int which) { return rank().roles[static_cast<size_t>(team_ * roles_a_team + which)]; }
  Role& source() { return of_team(0); }
  Role& reader() { return of_team(1); }
  Role& gatherer() { return of_team(2); }
  Role& role() { return *m_.current().role; }
  void as(Role& r) { m_.current().role = &r; }
  // What an operation that was started with `seen` knows when it is performed: that, and what its own role has performed since.
  static Clock view(const Role& r, Clock seen) {
    seen.tick[static_cast<size_t>(r.actor)] = r.tick;
    return seen;
  }
  void knows_grants(const Role& r, const Place& to, const Clock& now) {
    if (!to.grants) return;
    for (int i = 0; i < (to.flat() ? 1 : to.count); ++i) {
      Word* tag = const_cast<Word*>(&to.grants[to.flat() ? 0 : to.items[i].box.tensor].tag);
      Memory::Choice c = m_.memory.choice(tag, r.actor, now);
      if (c.oldest != c.newest) throw Broken("a copy to a place whose grant its role has not acquired");
    }
  }

  // -- words
  template <class F>
  static std::vector<Mark> wanted(int n, F mark) {
    std::vector<Mark> all;
    for (int p = 0; p < n; ++p)
      if (Mark m = mark(p); m.word) all.push_back(m);
    return all;
  }
  template <class F>
  std::vector<Waited> awaited(int n, F mark) const {
    std::vector<Waited> all;
    for (int i = 0; i < n; ++i)
      if (Mark m = mark(i); m.word) all.push_back({c_.peer_of_mark(i), m.word, m.value});
    return all;
  }
  void store(Role& r, Mark m, const Clock& released) {
    trace(r, "publishes", m.word, m.value);
    auto clock = m_.temper.flaw == Flaw::relaxed_notify ? nullptr : std::make_shared<Clock>(released);
    m_.memory.store(m.word, m.value, r.now(), clock);
  }
  void show(Role& r, const GrantMark& m, const Clock& released) {
    m_.note(&r, "grants place %llu, message %llu", m.value.place, number_of(m.value.tag));
    m_.memory.store_line(&m.line->tag, m.value.tag, m.value.place, r.now(), std::make_shared<Clock>(released));
  }
  void trace(const Role& r, const char* what, const Word* word, Word value) {
    if (m_.tracing)
      m_.note(&r, "%s %s = %llu:%06llx", what, m_.name(word).c_str(), value >> signature_bits, value & signature_mask);
  }

  static bool reaches(Word has, Word wanted) { return has >= wanted; }
  static bool is_message(Word has, Word wanted) { return number_of(has) == number_of(wanted); }
  using Good = bool (*)(Word has, Word wanted);

  // All have come: yes. A tag of another call, or a peer that is in another call: other. Given up: never.
  Arrival settle(std::vector<Waited>& all, Good good, Where where) {
    Role& r = role();
    if (r.failed) throw Broken("R5: a role waits after a wait that failed");
    Arrival got = Arrival::yes;
    auto over = [&] {
      bool missing = false;
      for (Waited& w : all) {
        bool came = poll(r, w, good);
        if (came && good == is_message && w.has != w.wanted) got = fail(r, "mismatch", w.peer, Arrival::other);
        if (came) continue;
        missing = true;
        if (where.what != Where::What::home && (m_.last_chance() || m_.random.chance(3)) && hopeless(r, w.peer) &&
            !still(r, w, good))
          got = fail(r, "mismatch", w.peer, Arrival::other);
      }
      if (missing && got == Arrival::yes && poisoned()) got = Arrival::never;
      return !missing || got != Arrival::yes;
    };
    m_.block(over, [&] { return describe(all, where); });
    for (const Waited& w : all)
      if (got == Arrival::yes && where.what == Where::What::grant && !allowed(w))
        got = fail(r, "grant", w.peer, Arrival::never);
    r.failed = got != Arrival::yes;
    return got;
  }
  Arrival settle(std::vector<Incoming>& all, Where where) {
    std::vector<Waited> lines;
    for (const Incoming& in : all)
      for (i64 k = 0; k < in.lines(); ++k) lines.push_back({in.peer, tag_of(in.packet, k), in.packet.tag});
    Arrival got = settle(lines, is_message, where);
    auto line = lines.begin();
    for (Incoming& in : all)
      for (i64 k = 0; k < in.lines(); ++k) in.payload.push_back(line++->payload);
    return got;
  }
  bool poll(Role& r, Waited& w, Good good) {
    if (w.come) return true;
    const Version* v = m_.load(w.word, r, [&](const Version& has) { return good(has.value, w.wanted); });
    if (!v) return false;
    trace(r, "sees", w.word, v->value);
    m_.memory.has_read(w.word, v, r.now());
    if (v->released && m_.temper.flaw != Flaw::relaxed_wait) r.seen.join(*v->released);
    w.has = v->value;
    w.payload = v->payload;
    return w.come = true;
  }
  // After a look at the post: the oldest version that a load may still return must do.
  bool still(Role& r, const Waited& w, Good good) {
    return good(m_.memory.choice(w.word, r.actor, r.seen).oldest->value, w.wanted);
  }
  bool hopeless(Role& r, int peer) {
    Word* post = Inbox{c_.geometry, c_.own_arena()}.post(peer);
    const Version* v = m_.load(post, r, [](const Version&) { return true; });
    m_.memory.has_read(post, v, r.now());
    if (v->released) r.seen.join(*v->released);
    return v->value == farewell || elsewhere(v->value, c_.progress->calls, c_.signature);
  }
  bool allowed(const Waited& grant) const {
    i64 place = static_cast<i64>(grant.payload);
    return place >= c_.geometry.heap_at && place <= c_.geometry.arena_bytes - c_.pair[grant.peer].reach;
  }
  bool poisoned() {
    if (rank().poisoned_at < 0 || (!m_.last_chance() && m_.turns() < rank().poisoned_at)) return false;
    rank().poisoned_at = smaller(rank().poisoned_at, m_.turns());  // what one role has seen the whole rank knows
    return true;
  }
  Arrival fail(Role& r, const char* fault, int peer, Arrival how) {
    m_.note(&r, "gives up: %s, rank %d", fault, c_.rank_of(peer));
    if (rank().fault.empty()) rank().fault = fault;
    for (Rank& other : ranks_)
      if (other.poisoned_at < 0) other.poisoned_at = m_.turns() + m_.random.below(300);
    rank().poisoned_at = m_.turns();
    return how;
  }
  std::string describe(const std::vector<Waited>& all, Where where) const {
    static const char* const whats[] = {"credit", "a message", "a grant", "what it sends itself"};
    std::string text = std::string(whats[static_cast<int>(where.what)]) + ", use " +
                       std::to_string(static_cast<int>(where.use)) + ", step " + std::to_string(where.step) +
                       ", team " + std::to_string(team_) + ", of ranks";
    for (const Waited& w : all)
      if (!w.come) text += " " + std::to_string(c_.rank_of(w.peer));
    return text;
  }

  // What lies in a place; nothing in particular between two items.
  std::string load(Role& r, const Clock& now, const Place& from, Range range) {
    std::string all(static_cast<size_t>(range.hi - range.lo), 0);
    for_each_piece(in_slot(all.data(), range.lo), from, range, [&](char* write, const char* read, i64 bytes) {
      m_.memory.read(read, bytes, r.now(), now);
      std::memcpy(write, read, static_cast<size_t>(bytes));
    });
    return all;
  }

  // -- packets
  // In order: the source is read. Then the lines go out one by one, in any order.
  void pack(Role& r, const Clock& now, const Packet& out) {
    m_.note(&r, "reads a packet, wire [%lld, %lld)", out.range.lo, out.range.hi);
    std::vector<Word> payload(static_cast<size_t>(ceil_div(out.range.hi - out.range.lo, payload_bytes)));
    std::string bytes = load(r, now, out.place, out.range);
    std::memcpy(payload.data(), bytes.data(), bytes.size());
    for (size_t k = 0; k < payload.size(); ++k) {
      r.loose.push_back([this, &r, now, line = tag_of(out, static_cast<i64>(k)), tag = out.tag, bytes = payload[k]] {
        if (!m_.memory.let_go(line, now)) throw Broken("a packet line is overwritten before it was read");
        m_.memory.store_line(line, tag, bytes, r.now(), nullptr);
        return true;
      });
    }
  }
  void unpack(Role& r, const Clock& now, const Incoming& in) {
    m_.note(&r, "unpacks wire [%lld, %lld)", in.packet.range.lo, in.packet.range.hi);
    Place payload = in_slot(const_cast<char*>(in.bytes()), in.packet.range.lo);
    for_each_piece(in.packet.place, payload, in.packet.range, [&](char* write, const char* read, i64 bytes) {
      m_.memory.write(write, bytes, r.now(), now);
      std::memcpy(write, read, static_cast<size_t>(bytes));
    });
  }

  // -- sums
  Act folding(Place to, Place own, std::vector<const char*> from, Range range, Sum sum,
              std::shared_ptr<std::vector<Incoming>> kept) {
    Role& r = role();
    return [this, &r, seen = r.seen, to, own, from = std::move(from), range, sum, kept] {
      m_.note(&r, "reduces wire [%lld, %lld)", range.lo, range.hi);
      Clock now = view(r, seen);
      Cursor write(to, range.lo), mine(own, range.lo);
      for (i64 wire = range.lo; wire < range.hi;) {
        i64 bytes = smaller(range.hi - wire, smaller(write.left(), mine.left()));
        if (write.at() && mine.at())
          for (i64 i = 0; i < bytes;)
            i += fold(r, now, write.at() + i, mine.at() + i, from, wire - range.lo + i, sum, kept.get());
        write.advance(bytes);
        mine.advance(bytes);
        wire += bytes;
      }
      return true;
    };
  }
  // One element; returns its bytes.
  i64 fold(Role& r, const Clock& now, char* to, const char* mine, const std::vector<const char*>& from, i64 at, Sum sum,
           const std::vector<Incoming>* packets) {
    i64 size = 0;
    numeric::with_dtype(sum.dtype, [&](auto type) {
      using T = decltype(type);
      typename T::Stored one;
      typename T::Wide total{};
      size = sizeof one;
      for (size_t k = 0; k < from.size(); ++k) {
        const char* source = from[k] ? from[k] + at : mine;
        if (!packets || m_.memory.holds(source))
          m_.memory.read(source, size, r.now(), now);  // else the payload of a packet that was taken
        std::memcpy(&one, source, sizeof one);
        total = k == 0 ? T::widen(one) : join(sum.op, total, T::widen(one));
      }
      if (sum.op == Op::avg) total = total / static_cast<typename T::Wide>(from.size());
      one = T::narrow(total);
      m_.memory.write(to, size, r.now(), now);
      std::memcpy(to, &one, sizeof one);
    });
    return size;
  }
  template <class W>
  static W join(Op op, W a, W b) {
    switch (op) {
      case Op::max: return numeric::join<Op::max>(a, b);
      case Op::min: return numeric::join<Op::min>(a, b);
      default: return numeric::join<Op::sum>(a, b);
    }
  }

  Machine& m_;
  std::vector<Rank>& ranks_;
  const Call& c_;
  int team_;
  Roles roles_;
};

}  // namespace purlin::model
