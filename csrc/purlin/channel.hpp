// Where slots, words and counts lie. Every ordered pair (source -> reader), every team and every use has its own, at addresses that depend on the
// communicator alone, never on a call: calls may change regime and team count freely.
//
// One arena a rank, in memory that every peer can write:
//   poison | a post of every peer | words of every (peer, team) | ring slots | packet windows | heap of granted outputs
// Behind each of the last four lies a line that nobody writes: room for a canary.
// A word has one writer; words of different writers never share a line of 64 bytes.
#pragma once
#include "moves.hpp"

namespace purlin {

enum class Use { ring, gather, packet, direct, home };  // home: what a rank's staging role tells the one that adds
constexpr int uses = 5;
constexpr int packet_slots = 4;  // a power of two, for what is left of a division by it is a mask
constexpr i64 line = 64;

// tag: {message number : 40, signature : 24}. A slot's stale tag is always `slots` messages old, so comparing 40 bits for equality is safe under wrap.
constexpr int signature_bits = 24;
constexpr unsigned signature_mask = (1u << signature_bits) - 1;
PURLIN_FN constexpr Word tag(Word message, unsigned signature) {
  return message << signature_bits | (signature & signature_mask);
}
// The count in `freed` from which on the slot of this message is free: all older messages of that slot have been let go of.
PURLIN_FN constexpr Word credit_for(Word message, int slots) {
  Word all = static_cast<Word>(slots);
  return message + 1 > all ? message + 1 - all : 0;
}
PURLIN_FN constexpr Word number_of(Word tag) { return tag >> signature_bits; }
PURLIN_FN constexpr unsigned signature_of(Word tag) { return static_cast<unsigned>(tag) & signature_mask; }

// Private to a rank; one a (peer, team). Read at entry, written at exit, each by the role that owns it.
struct Counts {
  Word sent[uses];   // messages staged for the peer
  Word taken[uses];  // messages of the peer consumed

  PURLIN_FN Word* sent_on(Use use) { return sent + static_cast<int>(use); }
  PURLIN_FN Word* taken_on(Use use) { return taken + static_cast<int>(use); }
};

struct Progress {  // private to a rank
  Word calls;      // calls made; the last team to leave counts one
  Word left;       // teams that have left the call that runs
};

struct Geometry {
  int ranks, teams, slots;
  int slot_bytes;     // a ring slot
  int window_bytes;   // wire bytes a packet slot can carry, one team of one pair
  int window_stored;  // bytes of memory of that packet slot: its lines hold tags too
  i64 heap_bytes;     // for granted outputs
  // filled by lay_out
  int pair_words;
  i64 words_at, rings_at, packets_at, heap_at, arena_bytes;
};

PURLIN_FN Geometry lay_out(Geometry g) {
  i64 channels = static_cast<i64>(g.ranks - 1) * g.teams;
  i64 ready = round_up(g.slots * static_cast<i64>(sizeof(Word)), line);
  g.pair_words = static_cast<int>(2 * ready + 4 * line);  // ready of both rings, direct ready, home, grants, freed
  g.words_at = line + (g.ranks - 1) * line;
  g.rings_at = round_up(g.words_at + channels * g.pair_words + line, 4096);
  g.packets_at = round_up(g.rings_at + channels * 2 * g.slots * g.slot_bytes + line, 4096);
  g.heap_at = round_up(g.packets_at + channels * packet_slots * g.window_stored + line, 4096);
  g.arena_bytes = round_up(g.heap_at + g.heap_bytes + line, 4096);
  return g;
}

// Addresses in the arena of a rank. `peer` counts that rank's peers.
struct Inbox {
  const Geometry& g;
  char* arena;

  PURLIN_FN Word* poison() const { return word(0); }
  PURLIN_FN Word* post(int peer) const {
    return word(line + peer * line);
  }  // {calls : 40, signature : 24} of the peer's latest call
  // Not by a division, which costs a GPU half a microsecond, when the slots are a power of two.
  PURLIN_FN int slot_of(Word message) const {
    Word slots = static_cast<Word>(g.slots);
    return static_cast<int>((slots & (slots - 1)) == 0 ? message & (slots - 1) : message % slots);
  }
  PURLIN_FN char* slot(int peer, int team, Use use, Word message) const {
    int ring = (channel(peer, team) * 2 + (use == Use::gather)) * g.slots;
    return arena + g.rings_at + i64{ring + slot_of(message)} * g.slot_bytes;
  }
  // ready >> 24 == m: message m lies in its slot. Written by the source.
  PURLIN_FN Word* ready(int peer, int team, Use use, Word message) const {
    i64 ring = round_up(g.slots * static_cast<i64>(sizeof(Word)), line);
    i64 at = use == Use::direct ? 2 * ring : (use == Use::gather) * ring + slot_of(message) * 8;
    return word(words(peer, team) + at);
  }
  // How many messages to the peer have been staged from what this call overwrites. Written by this rank itself.
  PURLIN_FN Word* home(int peer, int team) const { return word(words(peer, team) + g.pair_words - 3 * line); }
  // The peer, as reader, gives leave to write its outputs. Written by the reader into the source's arena.
  PURLIN_FN Grant* grants(int peer, int team) const {
    return reinterpret_cast<Grant*>(arena + words(peer, team) + g.pair_words - 2 * line);
  }
  // Messages the peer has let go of. Written by the reader into the source's arena.
  PURLIN_FN Word* freed(int peer, int team, Use use) const {
    return word(words(peer, team) + g.pair_words - line + static_cast<int>(use) * 8);
  }
  PURLIN_FN char* window(int peer, int team, Word message) const {
    int windows = channel(peer, team) * packet_slots;
    return arena + g.packets_at + i64{windows + static_cast<int>(message % packet_slots)} * g.window_stored;
  }

 private:
  // Numbers of 32 bits, multiplied into 64: a GPU does that in one instruction.
  PURLIN_FN int channel(int peer, int team) const { return peer * g.teams + team; }
  PURLIN_FN i64 words(int peer, int team) const { return g.words_at + i64{channel(peer, team)} * g.pair_words; }
  PURLIN_FN Word* word(i64 at) const { return reinterpret_cast<Word*>(arena + at); }
};

}  // namespace purlin
