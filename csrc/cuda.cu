// Where the protocol and the CUDA Atoms meet: kernels, their launch, and the end of a communicator on a GPU.
//
// A kernel's block is one team of one rank. Its Call comes as an argument; a world of several ranks on one GPU may be *fused* into one launch, whose grid
// holds the teams of all ranks, team-major, with a Call a rank in device memory.
#include "purlin/endpoint.hpp"

#include "purlin/atom/sm80.cuh"
#include "purlin/snac.hpp"

#include <cuda_runtime.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>

namespace purlin {
namespace gpu {

constexpr int near_items = 8;  // boxes that travel with the call; a plan with more keeps them in device memory

struct Launch {
  Call call;
  Item near[near_items];
  Page* page;
  unsigned long long timeout;
};
static_assert(sizeof(Launch) <= 4096, "a call's arguments stay within 4 KiB");

struct Shared {  // what a block keeps of its rank's call
  Launch launch;
  Counts counts[max_ranks - 1];
  Progress progress;
  Setting setting;
};

// A kernel's arguments lie in constant memory, which serves a warp one address at a time: all lanes read a word, and each keeps its own.
__device__ __forceinline__ void fetch(Launch& to, const Launch& from) {
  constexpr int words = sizeof(Launch) / sizeof(Word);
  const Word* read = reinterpret_cast<const Word*>(&from);
  int lane = static_cast<int>(threadIdx.x) % warp;
  for (int base = static_cast<int>(threadIdx.x) / warp * warp; base < words; base += static_cast<int>(blockDim.x)) {
    Word mine = 0;
#pragma unroll
    for (int k = 0; k < warp; ++k) {
      Word word = base + k < words ? read[base + k] : 0;
      if (k == lane) mine = word;
    }
    if (base + lane < words) reinterpret_cast<Word*>(&to)[base + lane] = mine;
  }
}

// A near item's address is its offset in `near`: no device address is that small.
__device__ __forceinline__ void settle(Route& route, const Item* near) {
  unsigned long long offset = reinterpret_cast<unsigned long long>(route.items);
  if (offset <= sizeof(Item) * near_items)
    route.items = reinterpret_cast<const Item*>(reinterpret_cast<const char*>(near) + offset);
}

// Bring the call into shared memory; false when the communicator is dead.
__device__ __forceinline__ bool begin(Shared& shared, const Launch& launch, int team) {
  const Call& given = launch.call;
  int thread = static_cast<int>(threadIdx.x), peers = given.ranks - 1;
  Word poison = ptx::load_relaxed(poison_of(given, given.rank));
  constexpr int words = sizeof(Counts) / sizeof(Word);
  for (int k = thread; k < peers * words; k += static_cast<int>(blockDim.x))
    reinterpret_cast<Word*>(shared.counts)[k] = reinterpret_cast<const Word*>(&given.count(k / words, team))[k % words];
  if (thread == static_cast<int>(blockDim.x) - 1) shared.progress = *given.progress;
  fetch(shared.launch, launch);
  if (__syncthreads_or(poison != 0)) {
    if (thread == 0 && team == 0) {
      Setting setting{&shared.launch.call, shared.launch.page, shared.launch.timeout, team};
      tell_host(setting, ptx::load_relaxed(poison_of(given, given.rank)));
    }
    return false;
  }
  Call& call = shared.launch.call;
  if (thread < peers) {
    settle(call.pair[thread].send, shared.launch.near);
    settle(call.pair[thread].remote, shared.launch.near);
    settle(call.pair[thread].receive, shared.launch.near);
  } else if (thread == max_ranks) {
    settle(call.own_from, shared.launch.near);
    settle(call.own_to, shared.launch.near);
    call.counts = shared.counts - team;
    call.counts_pitch = 1;
    call.progress = &shared.progress;
    shared.setting = {&call, shared.launch.page, shared.launch.timeout, team};
  }
  __syncthreads();
  return true;
}

// Write the counts back. Team 0 counts the call: it is in every call, and a team that reads one too many is only slower to notice a peer's absence.
__device__ __forceinline__ void end(Shared& shared, const Launch& launch, int team) {
  __syncthreads();
  const Call& given = launch.call;
  constexpr int words = sizeof(Counts) / sizeof(Word);
  for (int k = static_cast<int>(threadIdx.x); k < (given.ranks - 1) * words; k += static_cast<int>(blockDim.x))
    reinterpret_cast<Word*>(&given.count(k / words, team))[k % words] = reinterpret_cast<const Word*>(shared.counts)[k];
  if (threadIdx.x == 0 && team == 0) given.progress->calls = shared.progress.calls + 1;
}

struct Seat {  // which call and team a block serves
  const Launch& launch;
  int team;
};
__device__ __forceinline__ Seat seat(const Launch& near, const Launch* far, int ranks_here) {
  int block = static_cast<int>(blockIdx.x);
  if (!far) return {near, block};
  return {far[block % ranks_here], block / ranks_here};
}

constexpr int together_threads = 512;

__global__ void __launch_bounds__(together_threads, 1)
    together(const __grid_constant__ Launch near, const Launch* far, int ranks_here) {
  __shared__ Shared shared;
  __shared__ Incoming incoming;
  auto [launch, team] = seat(near, far, ranks_here);
  if (!begin(shared, launch, team)) return;
  Together atom(shared.setting, &incoming);
  const Call& call = *shared.setting.call;
  if (call.regime == Regime::packet) {
    snac::packets(atom, call);
  } else {
    snac::direct(atom, call);
  }
  end(shared, launch, team);
}

__global__ void __launch_bounds__(2 * role_threads, 1)
    apart(const __grid_constant__ Launch near, const Launch* far, int ranks_here) {
  __shared__ Shared shared;
  __shared__ Crossing crossings[2];
  auto [launch, team] = seat(near, far, ranks_here);
  if (threadIdx.x < 2) crossings[threadIdx.x].init();
  if (!begin(shared, launch, team)) return;
  Apart atom(shared.setting, crossings);
  snac::staged(atom, *shared.setting.call);
  end(shared, launch, team);
}

// ---- launching

using Kernel = void (*)(Launch, const Launch*, int);
struct Choice {
  Kernel kernel;
  int threads;
};
Choice choose(Regime regime) {
  if (regime == Regime::staged) return {apart, 2 * role_threads};
  return {together, together_threads};
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

int resident_blocks(const Choice& choice) {
  int device = 0, processors = 0, each = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, choice.kernel, choice.threads, 0), "occupancy");
  return processors * each;
}

// Ranks of one process on one GPU whose calls go into one launch: each brings its own, the last one to come launches.
class Fusion {
 public:
  explicit Fusion(int ranks) : launches_(static_cast<std::size_t>(ranks)) {
    check(cudaMalloc(&far_, sizeof(Launch) * launches_.size()), "cudaMalloc");
  }
  ~Fusion() { cudaFree(far_); }

  enum class Turn { launched, alone, differ };

  // alone: the other ranks did not come within `timeout`; differ: they need different kernels, so none was launched.
  Turn bring(const Launch& launch, cudaStream_t stream, std::chrono::nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    launches_[static_cast<std::size_t>(launch.call.rank)] = launch;
    long turn = turn_;
    if (++come_ < static_cast<int>(launches_.size())) {
      if (everyone_.wait_for(lock, timeout, [&] { return turn_ != turn; })) return how_;
      --come_;
      return Turn::alone;
    }
    come_ = 0;
    ++turn_;
    how_ = fire(stream);
    everyone_.notify_all();
    return how_;
  }

 private:
  Turn fire(cudaStream_t stream) {
    Choice choice = choose(launches_[0].call.regime);
    int ranks = static_cast<int>(launches_.size()), teams = launches_[0].call.teams;
    for (const Launch& other : launches_)
      if (other.call.regime != launches_[0].call.regime || other.call.teams != teams) return Turn::differ;
    check(cudaMemcpyAsync(far_, launches_.data(), sizeof(Launch) * launches_.size(), cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
    choice.kernel<<<static_cast<unsigned>(teams * ranks), static_cast<unsigned>(choice.threads), 0, stream>>>(
        launches_[0], far_, ranks);
    check(cudaGetLastError(), "launch");
    return Turn::launched;
  }

  std::mutex mutex_;
  std::condition_variable everyone_;
  std::vector<Launch> launches_;
  Launch* far_ = nullptr;
  int come_ = 0;
  long turn_ = 0;
  Turn how_ = Turn::launched;
};

__global__ void begin_words(Geometry g, char* arena, Word message) {
  Inbox inbox{g, arena};
  Word stale = tag(message - 1, 0);
  int p = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if (thread == 0) *inbox.post(p) = stale;
  for (int t = thread; t < g.teams; t += threads) {
    for (int s = 0; s < g.slots; ++s)
      for (Use use : {Use::ring, Use::gather, Use::direct}) *inbox.ready(p, t, use, static_cast<Word>(s)) = stale;
    for (int k = 0; k < max_grants; ++k) inbox.grants(p, t)[k].tag = stale;
    for (int use = 0; use < uses; ++use) *inbox.freed(p, t, static_cast<Use>(use)) = message;
  }
  for (int t = 0; t < g.teams; ++t)
    for (int s = 0; s < packet_slots; ++s)
      for (i64 at = thread * line_bytes; at < g.window_stored; at += threads * line_bytes)
        *reinterpret_cast<Word*>(inbox.window(p, t, static_cast<Word>(s)) + at + payload_bytes) = stale;
}
__global__ void begin_counts(Counts* counts, int n, Progress* progress, Word message) {
  for (int k = static_cast<int>(threadIdx.x); k < n; k += static_cast<int>(blockDim.x))
    for (int use = 0; use < uses; ++use) counts[k].sent[use] = counts[k].taken[use] = message;
  if (threadIdx.x == 0) *progress = {message, 0};
}

}  // namespace gpu

// ---- plans: a few boxes travel with the call, more lie in device memory

std::shared_ptr<const Item> keep_items(const std::vector<Item>& items) {
  if (items.size() <= gpu::near_items) return nullptr;  // offsets from nullptr: see settle()
  Item* there = nullptr;
  gpu::check(cudaMalloc(&there, items.size() * sizeof(Item)), "cudaMalloc");
  gpu::check(cudaMemcpy(there, items.data(), items.size() * sizeof(Item), cudaMemcpyHostToDevice), "cudaMemcpy");
  return {there, [](const Item* p) { cudaFree(const_cast<Item*>(p)); }};
}

i64 stored_bytes(i64 window_bytes) { return ceil_div(window_bytes, gpu::payload_bytes) * gpu::line_bytes; }

// ---- the end of a communicator

struct Endpoint::State {
  int rank = 0;
  Geometry geometry{};
  std::vector<char*> arenas;  // by rank
  Counts* counts = nullptr;   // device memory: counts, then progress
  Progress* progress = nullptr;
  gpu::Page* page = nullptr;
  cudaStream_t side = nullptr;  // for words that must pass a kernel that spins
  std::chrono::nanoseconds timeout{};
  Word calls = 1;  // made from this host; a replayed graph is not counted
  std::shared_ptr<gpu::Fusion> fusion;

  Inbox inbox() const { return {geometry, arenas[static_cast<std::size_t>(rank)]}; }
  int channels() const { return (geometry.ranks - 1) * geometry.teams; }
  bool dead() const { return *static_cast<volatile Word*>(&page->poison) != 0; }
  void die(Poison poison) {
    if (!dead()) *static_cast<volatile Word*>(&page->poison) = encode(poison);
  }
};

Endpoint::Endpoint(int rank, const Geometry& geometry, std::vector<std::uintptr_t> arenas, double timeout_s, bool (*)())
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.rank = rank;
  s.geometry = geometry;
  for (std::uintptr_t arena : arenas) s.arenas.push_back(reinterpret_cast<char*>(arena));
  s.timeout = std::chrono::nanoseconds(static_cast<i64>(timeout_s * 1e9));
  std::size_t bytes = sizeof(Counts) * static_cast<std::size_t>(s.channels()) + sizeof(Progress);
  gpu::check(cudaMalloc(&s.counts, bytes), "cudaMalloc");
  s.progress = reinterpret_cast<Progress*>(s.counts + s.channels());
  gpu::check(cudaHostAlloc(&s.page, sizeof(gpu::Page), cudaHostAllocDefault), "cudaHostAlloc");
  *s.page = {};
  gpu::check(cudaStreamCreateWithFlags(&s.side, cudaStreamNonBlocking), "cudaStreamCreate");
  for (Regime regime : {Regime::packet, Regime::staged}) {  // loading a module behind a kernel that spins can hang
    cudaFuncAttributes attributes;
    gpu::check(cudaFuncGetAttributes(&attributes, gpu::choose(regime).kernel), "cudaFuncGetAttributes");
  }
  begin_at(1);
}

// What a peer may still write is never given back here: the arena is the caller's, and it keeps it while anyone has it mapped.
Endpoint::~Endpoint() {
  cudaStreamDestroy(state_->side);
  cudaFreeHost(state_->page);
  cudaFree(state_->counts);
}

void Endpoint::begin_at(Word message) {
  State& s = *state_;
  s.calls = message;
  if (s.geometry.ranks > 1)
    gpu::begin_words<<<static_cast<unsigned>(s.geometry.ranks - 1), 256, 0, s.side>>>(s.geometry, s.inbox().arena,
                                                                                      message);
  gpu::begin_counts<<<1, 256, 0, s.side>>>(s.counts, s.channels(), s.progress, message);
  gpu::check(cudaStreamSynchronize(s.side), "begin_at");
}

Outcome Endpoint::run(const Plan& plan, std::span<const std::uintptr_t> inputs, std::span<const std::uintptr_t> outputs,
                      std::uintptr_t stream) {
  State& s = *state_;
  if (!plan.takes(inputs.size(), outputs.size())) return Outcome::bad_plan;
  if (plan.overlaps(inputs, outputs)) return Outcome::overlap;
  if (s.dead()) return static_cast<Outcome>(death().what);
  gpu::Launch launch{};
  Call& call = launch.call;
  call = plan.call_with(plan.where());
  if (!plan.where()) std::copy(plan.items().begin(), plan.items().end(), launch.near);
  call.geometry = s.geometry;
  std::copy(s.arenas.begin(), s.arenas.end(), call.arena);
  for (std::size_t i = 0; i < inputs.size(); ++i) call.input[i] = reinterpret_cast<char*>(inputs[i]);
  for (std::size_t o = 0; o < outputs.size(); ++o) call.output[o] = reinterpret_cast<char*>(outputs[o]);
  call.counts = s.counts;
  call.counts_pitch = s.geometry.teams;
  call.progress = s.progress;
  launch.page = s.page;
  launch.timeout = static_cast<unsigned long long>(s.timeout.count());
  auto on = reinterpret_cast<cudaStream_t>(stream);
  ++s.calls;
  if (s.fusion) {
    switch (s.fusion->bring(launch, on, s.timeout)) {
      case gpu::Fusion::Turn::launched: break;
      case gpu::Fusion::Turn::alone: s.die({Fault::stall, s.rank, (s.rank + 1) % s.geometry.ranks}); break;
      case gpu::Fusion::Turn::differ: s.die({Fault::mismatch, s.rank, (s.rank + 1) % s.geometry.ranks}); break;
    }
    return static_cast<Outcome>(death().what);
  }
  gpu::Choice choice = gpu::choose(call.regime);
  choice.kernel<<<static_cast<unsigned>(call.teams), static_cast<unsigned>(choice.threads), 0, on>>>(launch, nullptr,
                                                                                                     1);
  gpu::check(cudaGetLastError(), "launch");
  return Outcome::done;
}

void Endpoint::abort(int fault, int about) {
  State& s = *state_;
  Poison poison{static_cast<Fault>(fault), s.rank, about};
  s.die(poison);
  *static_cast<volatile Word*>(&s.page->abort) = 1;
  Word word = encode(poison);
  for (char* arena : s.arenas)
    cudaMemcpyAsync(Inbox{s.geometry, arena}.poison(), &word, sizeof word, cudaMemcpyHostToDevice, s.side);
  cudaStreamSynchronize(s.side);
}

// Told in the stream's order behind this rank's calls: whoever waits for one that never comes fails.
void Endpoint::leave() {
  State& s = *state_;
  for (int p = 0; p < s.geometry.ranks - 1; ++p) {
    char* theirs = s.arenas[static_cast<std::size_t>((s.rank + 1 + p) % s.geometry.ranks)];
    cudaMemcpyAsync(Inbox{s.geometry, theirs}.post(s.geometry.ranks - 2 - p), &farewell, sizeof farewell,
                    cudaMemcpyHostToDevice, s.side);
  }
  cudaStreamSynchronize(s.side);
}

Death Endpoint::death() const {
  Word word = *static_cast<volatile Word*>(&state_->page->poison);
  if (word == 0) return {0, 0, 0};
  Poison poison = decode(word);
  return {static_cast<int>(poison.fault), poison.by, poison.about};
}

Stalled Endpoint::stalled() const {
  const Record& r = state_->page->record;
  return {static_cast<int>(r.where.what), static_cast<int>(r.where.use), r.where.step, r.team, r.peer};
}

Word Endpoint::calls() const { return state_->dead() && state_->page->calls ? state_->page->calls : state_->calls - 1; }

Word Endpoint::post(int peer_rank) const {
  const State& s = *state_;
  int ranks = s.geometry.ranks, peer = (peer_rank - s.rank - 1 + ranks) % ranks;
  Word word = 0;
  cudaMemcpyAsync(&word, s.inbox().post(peer), sizeof word, cudaMemcpyDeviceToHost, s.side);
  cudaStreamSynchronize(s.side);
  return word;
}

void fuse(const std::vector<Endpoint*>& ranks) {
  int teams = 0;
  for (Endpoint* end : ranks) teams += end->state_->geometry.teams;
  for (Regime regime : {Regime::packet, Regime::staged})
    if (gpu::resident_blocks(gpu::choose(regime)) < teams)
      throw std::invalid_argument("more teams than this GPU can hold at once; make the world with fewer");
  auto fusion = std::make_shared<gpu::Fusion>(static_cast<int>(ranks.size()));
  for (Endpoint* end : ranks) end->state_->fusion = fusion;
}

}  // namespace purlin
