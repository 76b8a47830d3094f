// The model Atom: as weak as the contract allows. What a role starts is kept and performed later, as late as the next thing that waits for it; the order
// within a role (R1), and nothing else, is kept. A word published by notify carries what its role had done and seen; wait and expect learn it.
// Packets carry their payload and nothing else; what tell and grant publish is what the call before had seen.
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

class Model {
 public:
  static constexpr bool flat = false;
  Model(Machine& machine, std::vector<Rank>& ranks, const Call& call, int team, Roles roles)
      : m_(machine), ranks_(ranks), c_(call), team_(team), roles_(roles) {}

  int team() const { return team_; }
  int teams() const { return c_.teams; }
  Word sent(Use use, int peer) const { return *c_.count(peer, team_).sent_on(use); }
  Word taken(Use use, int peer) const { return *c_.count(peer, team_).taken_on(use); }
  bool enter() { return !poisoned(); }
  void leave() {
    for (Role* r : {&gatherer(), &reader(), &source()}) {
      rank().host.join(r->seen);
      rank().host.learn(r->now());
    }
    if (++c_.progress->left < static_cast<Word>(c_.teams)) return;
    c_.progress->left = 0;
    ++c_.progress->calls;
  }

  template <class C, class S>
  void both(int lag, C consume, S stage) {
    three(lag, concepts::Role{}, consume, stage);
  }
  template <class G, class C, class S>
  void three(int lag, G gather, C consume, S stage) {
    for (Role* r : {&gatherer(), &reader(), &source()}) begin(*r);
    if (roles_ == Roles::side_by_side) {
      Fibre& second = m_.spawn(c_.rank, [&] { live(reader(), consume); });
      Fibre& third = m_.spawn(c_.rank, [&] { live(gatherer(), gather); });
      live(source(), stage);
      m_.join(second);
      m_.join(third);
      return;
    }
    if (roles_ == Roles::in_turn) {
      Fibre& crew = m_.spawn(c_.rank, [&] { live_in_turn(lag, gather, consume); });
      live(source(), stage);
      m_.join(crew);
      return;
    }
    as(reader()), consume.open();
    as(gatherer()), gather.open();
    as(source()), stage.open();
    for (Role* r : {&gatherer(), &reader(), &source()}) r->phase = Role::Phase::steps;
    int last = std::max({stage.steps(), consume.steps() + lag, gather.steps() + 2 * lag});
    for (int i = 0; i < last; ++i) {
      step(source(), stage, i);
      step(reader(), consume, i - lag);
      step(gatherer(), gather, i - 2 * lag);
    }
    end(source(), stage);
    end(reader(), consume);
    end(gatherer(), gather);
  }

  // As early as can be, or, where the hint is not taken, as late.
  void ahead(Place from, Range range) {
    starts("ahead");
    if (!m_.random.chance(50)) return;
    Role& r = role();
    m_.note(&r, "reads ahead, wire [%lld, %lld)", range.lo, range.hi);
    r.held = {from, range, std::make_shared<std::string>(load(r, view(r, r.seen), from, range))};
    m_.yield();
  }
  void copy(Place to, Place from, Range range) {
    starts("copy");
    Role& r = role();
    auto held = r.held.is(from, range) ? r.held.bytes : nullptr;
    r.queue.push_back([this, &r, seen = r.seen, to, from, range, held] {
      m_.note(&r, "copies wire [%lld, %lld)", range.lo, range.hi);
      Clock now = view(r, seen);
      knows_grants(r, to, now);
      for_each_piece(to, held ? in_slot(held->data(), range.lo) : from, range,
                     [&](char* write, const char* read, i64 bytes) {
                       if (write == read) return;
                       if (!held) m_.memory.read(read, bytes, r.now(), now);
                       m_.memory.write(write, bytes, r.now(), now);
                       std::memcpy(write, read, static_cast<size_t>(bytes));
                     });
      return true;
    });
    m_.yield();
  }
  template <class T, class F>
  void reduce(int places, T to, Place own, int n, F slot, int self, Range range, Sum sum) {
    starts("reduce");
    std::vector<const char*> from;
    for (int k = 0; k < n; ++k) from.push_back(k == self ? nullptr : slot(k));
    role().queue.push_back(folding(to(0), own, std::move(from), range, sum, nullptr));
    m_.yield();
    for (int k = 1; k < places; ++k) copy(to(k), to(0), range);
  }

  template <class F>
  void notify(int n, F mark) {
    starts("notify");
    Role& r = role();
    std::vector<Mark> marks = wanted(n, mark);
    if (m_.temper.flaw == Flaw::early_notify) {
      for (Mark m : marks) r.loose.push_back([this, &r, seen = r.seen, m] { return store(r, m, view(r, seen)), true; });
    } else if (!marks.empty()) {
      r.queue.push_back([this, &r, seen = r.seen, marks]() mutable {
        i64 k = m_.random.below(static_cast<i64>(marks.size()));
        store(r, marks[static_cast<size_t>(k)], view(r, seen));
        marks.erase(marks.begin() + k);
        return marks.empty();
      });
    }
    m_.yield();
  }
  template <class F>
  void lend(int n, F line) {
    starts("lend");
    Role& r = role();
    std::vector<GrantMark> lines;
    for (int p = 0; p < n; ++p)
      if (GrantMark m = line(p); m.line) lines.push_back(m);
    if (!lines.empty())
      r.queue.push_back([this, &r, seen = r.seen, lines]() mutable {
        i64 k = m_.random.below(static_cast<i64>(lines.size()));
        show(r, lines[static_cast<size_t>(k)], view(r, seen));
        lines.erase(lines.begin() + k);
        return lines.empty();
      });
    m_.yield();
  }
  template <class F>
  void tell(int n, F mark) {
    opens("tell");
    Role& r = role();
    for (Mark m : wanted(n, mark)) r.loose.push_back([this, &r, m] { return store(r, m, r.start), true; });
    m_.yield();
  }
  template <class F>
  void grant(int n, F line) {
    opens("grant");
    Role& r = role();
    for (int p = 0; p < n; ++p) {
      GrantMark m = line(p);
      if (!m.line) continue;
      r.loose.push_back([this, &r, m] { return show(r, m, r.start), true; });
    }
    m_.yield();
  }
  template <class F>
  void keep(int n, F mark) {
    if (role().phase != Role::Phase::close) throw Broken("keep outside close()");
    for (Mark m : wanted(n, mark)) *m.word = m.value;
  }

  template <class F>
  Arrival wait(int n, F mark, Where where) {
    auto all = awaited(n, mark);
    return settle(all, reaches, where);
  }
  template <class F>
  Arrival expect(int n, F mark, Where where) {
    auto all = awaited(n, mark);
    return settle(all, is_message, where);
  }

  template <class C, class F, class G>
  Arrival put(int n, C credit, F source, G window, Where where) {
    starts("put");
    if (Arrival got = wait(n, credit, where); got != Arrival::yes) return got;
    Role& r = role();
    for (int p = 0; p < n; ++p) {
      Bytes from = source(p);
      if (from.range.empty()) continue;
      Lines lines = window(p);
      Packet out{lines.window, lines.tag, from.place, from.range};
      r.queue.push_back([this, &r, seen = r.seen, out] { return pack(r, view(r, seen), out), true; });
    }
    m_.yield();
    return Arrival::yes;
  }
  template <class F>
  Arrival take(int n, F packet, Where where) {
    std::vector<Incoming> all;
    for (int p = 0; p < n; ++p)
      if (Packet in = packet(p); in.window) all.push_back({p, in, {}});
    if (Arrival got = settle(all, where); got != Arrival::yes) return got;
    Role& r = role();
    for (Incoming& in : all)
      r.queue.push_back([this, &r, seen = r.seen, in = std::move(in)] { return unpack(r, view(r, seen), in), true; });
    return Arrival::yes;
  }
  template <class F>
  Arrival take_reduce(Place to, Place own, int n, F packet, int self, Sum sum, Where where) {
    std::vector<Incoming> all;
    for (int k = 0; k < n; ++k)
      if (k != self) all.push_back({c_.peer_of(k), packet(k), {}});
    if (Arrival got = settle(all, where); got != Arrival::yes) return got;
    std::vector<const char*> from;
    auto kept = std::make_shared<std::vector<Incoming>>(std::move(all));
    for (const Incoming& in : *kept) from.push_back(in.bytes());
    from.insert(from.begin() + self, nullptr);
    role().queue.push_back(folding(to, own, std::move(from), packet(self).range, sum, kept));
    return Arrival::yes;
  }

  // What either role started before has read its sources; what it writes to peers may still be on its way.
  void meet() {
    Role& r = role();
    m_.perform_queue(r);
    met_clock_.join(r.seen);
    met_clock_.learn(r.now());
    ++met_;
    if (roles_ != Roles::lockstep && m_.temper.flaw != Flaw::deaf_meet)
      m_.block([this] { return met_ == 2; }, [] { return std::string("the other role"); });
    if (m_.temper.flaw != Flaw::deaf_meet) r.seen.join(met_clock_);
  }
  void drain() {
    Role& r = role();
    r.draining = true;
    m_.block([&r] { return r.idle(); }, [] { return std::string("what it started"); });
    r.draining = false;
  }

 private:
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

  // -- roles
  Rank& rank() { return ranks_[static_cast<size_t>(c_.rank)]; }
  Role& of_team(int which) { return rank().roles[static_cast<size_t>(team_ * roles_a_team + which)]; }
  Role& source() { return of_team(0); }
  Role& reader() { return of_team(1); }
  Role& gatherer() { return of_team(2); }
  Role& role() { return *m_.current().role; }
  void as(Role& r) { m_.current().role = &r; }
  void begin(Role& r) {
    r.start = r.seen = rank().start;
    r.phase = Role::Phase::open;
    r.failed = false;
  }
  template <class R>
  void live(Role& r, R& behaves) {
    as(r);
    behaves.open();
    r.phase = Role::Phase::steps;
    for (int i = 0; i < behaves.steps(); ++i) step(r, behaves, i);
    end(r, behaves);
  }
  template <class G, class C>
  void live_in_turn(int lag, G& gather, C& consume) {
    as(reader()), consume.open();
    as(gatherer()), gather.open();
    reader().phase = gatherer().phase = Role::Phase::steps;
    for (int i = 0, last = std::max(consume.steps(), gather.steps() + lag); i < last; ++i) {
      step(reader(), consume, i);
      step(gatherer(), gather, i - lag);
    }
    end(reader(), consume);
    end(gatherer(), gather);
  }
  template <class R>
  void step(Role& r, R& behaves, int i) {
    if (i < 0 || i >= behaves.steps()) return;
    as(r);
    behaves.step(i);
    r.held = {};
  }
  template <class R>
  void end(Role& r, R& behaves) {
    as(r);
    drain();
    r.phase = Role::Phase::close;
    behaves.close();
    r.phase = Role::Phase::idle;
  }
  void starts(const char* what) {
    if (role().failed) throw Broken(std::string("R5: a role starts a ") + what + " after a wait that failed");
    if (role().phase != Role::Phase::steps) throw Broken(std::string(what) + " outside step()");
  }
  void opens(const char* what) {
    if (role().phase != Role::Phase::open) throw Broken(std::string(what) + " outside open()");
  }
  // What an operation that was started with `seen` knows when it is performed: that, and what its own role has performed since.
  static Clock view(const Role& r, Clock seen) {
    seen.tick[static_cast<size_t>(r.actor)] = r.tick;
    return seen;
  }
  void knows_grants(const Role& r, const Place& to, const Clock& now) {
    if (!to.grants) return;
    for (int i = 0; i < to.count; ++i) {
      Word* tag = const_cast<Word*>(&to.grants[to.items[i].box.tensor].tag);
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
        if ((m_.last_chance() || m_.random.chance(3)) && hopeless(r, w.peer) && !still(r, w, good))
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
    static const char* const whats[] = {"credit", "a message", "a grant"};
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
  int met_ = 0;
  Clock met_clock_;
};

}  // namespace purlin::model
