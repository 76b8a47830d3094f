// The end of a communicator on a GPU, the kernels' host side: plans in device memory, pages through which a kernel tells its host that it failed.
#include "../purlin/endpoint.hpp"

#include "../purlin/atom/packets.cuh"
#include "fusion.hpp"
#include "launch.hpp"
#include "remains.hpp"

#include <map>
#include <mutex>

namespace purlin {
namespace gpu {

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
    *inbox.home(p, t) = message;
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

// ---- plans: boxes lie in device memory

// One for all plans of a GPU, for good. When each plan had a stream of its own, kernels of ranks on streams were seen never to start: as if CUDA dealt its
// hardware queues out anew with each stream that is made or destroyed, and two ranks, which wait for one another, had got one. So it is made with the first
// memory or endpoint on its GPU.
static cudaStream_t messenger() {
  static std::mutex one_at_a_time;
  static auto& of_device = *new std::map<int, cudaStream_t>;  // for threads that plan while the process ends, too
  std::lock_guard lock(one_at_a_time);
  int device = 0;
  gpu::check(cudaGetDevice(&device), "cudaGetDevice");
  cudaStream_t& stream = of_device[device];
  if (!stream) gpu::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return stream;
}
// Not by cudaMemcpy, which would first wait for all that the legacy stream has been given, and may return before the bytes have arrived, which streams that
// do not wait for that one would not know.
static void send(void* there, const void* here, std::size_t bytes) {
  cudaStream_t stream = messenger();
  gpu::check(cudaMemcpyAsync(there, here, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  gpu::check(cudaStreamSynchronize(stream), "cudaMemcpyAsync");
}
std::shared_ptr<const Item> keep_items(const std::vector<Item>& items) {
  if (items.empty()) return nullptr;
  Item* there = nullptr;
  gpu::check(cudaMalloc(&there, items.size() * sizeof(Item)), "cudaMalloc");
  std::shared_ptr<const Item> kept(
      there, [](const Item* p) { gpu::Remains::of_process().leave(const_cast<Item*>(p), cudaFree); });
  send(there, items.data(), items.size() * sizeof(Item));
  return kept;
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
  int device = 0;
  bool bulk = false;            // has bulk copies
  Divider share{};              // Launch's
  cudaStream_t side = nullptr;  // for words that must pass a kernel that spins
  std::chrono::nanoseconds timeout{};
  Word calls = 1;  // made from this host; a replayed graph is not counted
  std::shared_ptr<gpu::Fusion> fusion;
  bool differs = false;  // the last call was brought, and not launched: no kernel has posted it

  Inbox inbox() const { return {geometry, arenas[static_cast<std::size_t>(rank)]}; }
  int channels() const { return (geometry.ranks - 1) * geometry.teams; }
  bool dead() const { return *static_cast<volatile Word*>(&page->poison) != 0; }
  void die(Poison poison) {
    if (!dead()) *static_cast<volatile Word*>(&page->poison) = encode(poison);
  }
  void learn() {  // what a peer has written into this rank's arena and no kernel has told
    Word word = 0;
    cudaMemcpyAsync(&word, inbox().poison(), sizeof word, cudaMemcpyDeviceToHost, side);
    cudaStreamSynchronize(side);
    if (word != 0) die(decode(word));
  }
};

Endpoint::Endpoint(int rank, const Geometry& geometry, std::vector<std::uintptr_t> arenas, double timeout_s, bool (*)())
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  gpu::check(cudaGetDevice(&s.device), "cudaGetDevice");
  s.bulk = gpu::bulk_copies_are_in_the_code();
  s.rank = rank;
  s.geometry = geometry;
  s.share = divider(static_cast<unsigned>(gpu::lanes_of(geometry.ranks - 1)));
  for (std::uintptr_t arena : arenas) s.arenas.push_back(reinterpret_cast<char*>(arena));
  s.timeout = std::chrono::nanoseconds(static_cast<i64>(timeout_s * 1e9));
  std::size_t bytes = sizeof(Counts) * static_cast<std::size_t>(s.channels()) + sizeof(Progress);
  gpu::check(cudaMalloc(&s.counts, bytes), "cudaMalloc");
  s.progress = reinterpret_cast<Progress*>(s.counts + s.channels());
  gpu::check(cudaHostAlloc(&s.page, sizeof(gpu::Page), cudaHostAllocDefault), "cudaHostAlloc");
  *s.page = {};
  gpu::check(cudaStreamCreateWithFlags(&s.side, cudaStreamNonBlocking), "cudaStreamCreate");
  gpu::load_kernels(1, s.bulk);
  messenger();
  begin_at(1);
  gpu::Remains::of_process().endpoint_begins();
}

// What a peer may still write is never given back here: the arena is the caller's, and it keeps it while anyone has it mapped.
Endpoint::~Endpoint() {
  int before = state_->device;
  cudaGetDevice(&before);
  cudaSetDevice(state_->device);
  cudaStreamDestroy(state_->side);
  cudaSetDevice(before);
  gpu::Remains& remains = gpu::Remains::of_process();
  remains.leave(state_->page, cudaFreeHost);
  remains.leave(state_->counts, cudaFree);
  remains.endpoint_ends();
}

void Endpoint::begin_at(Word message) {
  State& s = *state_;
  gpu::OnDevice on(s.device);
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
  gpu::Launch launch{s.share, s.page, static_cast<unsigned long long>(s.timeout.count()), plan.call()};
  Call& call = launch.call;
  call.geometry = s.geometry;
  std::copy(s.arenas.begin(), s.arenas.end(), call.arena);
  for (std::size_t i = 0; i < inputs.size(); ++i) call.input[i] = reinterpret_cast<char*>(inputs[i]);
  for (std::size_t o = 0; o < outputs.size(); ++o) call.output[o] = reinterpret_cast<char*>(outputs[o]);
  for (auto tensors : {inputs, outputs})
    for (std::uintptr_t tensor : tensors) call.even &= tensor % vector_bytes == 0;
  call.counts = s.counts;
  call.counts_pitch = s.geometry.teams;
  call.progress = s.progress;
  auto on = reinterpret_cast<cudaStream_t>(stream);
  ++s.calls;
  if (s.fusion) {
    gpu::OnDevice current(s.device);
    auto [how, other] = s.fusion->bring(launch, on, s.timeout);
    switch (how) {
      case gpu::Fusion::Turn::launched: break;
      case gpu::Fusion::Turn::abandoned: s.learn(); break;
      case gpu::Fusion::Turn::left: s.die({Fault::left, other, other}); break;
      case gpu::Fusion::Turn::alone: abort(static_cast<int>(Fault::stall), other); break;
      case gpu::Fusion::Turn::differ:
        s.differs = true;
        abort(static_cast<int>(Fault::mismatch), other);
        break;
    }
    return static_cast<Outcome>(death().what);
  }
  gpu::OnDevice current(s.device);
  gpu::launch(gpu::choose(call, 1, s.bulk), call.teams, &launch, on);
  return Outcome::done;
}

void Endpoint::abort(int fault, int about) {
  State& s = *state_;
  gpu::OnDevice on(s.device);
  Poison poison{static_cast<Fault>(fault), s.rank, about};
  s.die(poison);
  *static_cast<volatile Word*>(&s.page->abort) = 1;
  Word word = encode(poison);
  for (char* arena : s.arenas)
    cudaMemcpyAsync(Inbox{s.geometry, arena}.poison(), &word, sizeof word, cudaMemcpyHostToDevice, s.side);
  cudaStreamSynchronize(s.side);
  if (s.fusion) s.fusion->abandon();
}

// Told in the stream's order behind this rank's calls: whoever waits for one that never comes fails.
void Endpoint::leave() {
  State& s = *state_;
  gpu::OnDevice on(s.device);
  for (int p = 0; p < s.geometry.ranks - 1; ++p) {
    char* theirs = s.arenas[static_cast<std::size_t>((s.rank + 1 + p) % s.geometry.ranks)];
    cudaMemcpyAsync(Inbox{s.geometry, theirs}.post(s.geometry.ranks - 2 - p), &farewell, sizeof farewell,
                    cudaMemcpyHostToDevice, s.side);
  }
  cudaStreamSynchronize(s.side);
  if (s.fusion) s.fusion->leave(s.rank);
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

unsigned Endpoint::signature() const { return static_cast<unsigned>(state_->page->signature); }

Word Endpoint::post(int peer_rank) const {
  const State& s = *state_;
  if (s.differs) return tag(s.calls - 1, s.fusion->signature_of(peer_rank));
  gpu::OnDevice on(s.device);
  int ranks = s.geometry.ranks, peer = (peer_rank - s.rank - 1 + ranks) % ranks;
  Word word = 0;
  cudaMemcpyAsync(&word, s.inbox().post(peer), sizeof word, cudaMemcpyDeviceToHost, s.side);
  cudaStreamSynchronize(s.side);
  return word;
}

void fuse(const std::vector<Endpoint*>& ranks) {
  if (ranks.empty()) return;
  if (ranks.size() > gpu::most_fused)
    throw std::invalid_argument("one process holds at most 8 ranks of a world on GPUs");
  Endpoint::State& first = *ranks[0]->state_;
  std::vector<int> devices;
  int count = static_cast<int>(ranks.size()), teams = 0;
  bool one_gpu = true;
  for (Endpoint* end : ranks) {
    devices.push_back(end->state_->device);
    one_gpu = one_gpu && devices.back() == first.device;
    teams += end->state_->geometry.teams;
  }
  if (one_gpu) {
    gpu::OnDevice on(first.device);
    gpu::load_kernels(count, first.bulk);
    if (gpu::resident_blocks(count, first.bulk) < teams)
      throw std::invalid_argument("more teams than this GPU can hold at once; make the world with fewer");
  }
  auto fusion = std::make_shared<gpu::Fusion>(devices, first.bulk);
  for (Endpoint* end : ranks) end->state_->fusion = fusion;
}

// ---- memory

Memory::Memory(std::size_t bytes) : bytes_(bytes) {
  gpu::check(cudaMalloc(&first_, bytes), "cudaMalloc");
  gpu::check(cudaMemsetAsync(first_, 0, bytes, messenger()), "cudaMemset");
  gpu::check(cudaStreamSynchronize(messenger()), "cudaMemset");
}
Memory::~Memory() { gpu::Remains::of_process().leave(first_, cudaFree); }
void give_back() { gpu::Remains::of_process().give_back(); }
void reach(int peer) {
  int device = 0;
  gpu::check(cudaGetDevice(&device), "cudaGetDevice");
  if (device == peer) return;
  cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  gpu::check(error, "cudaDeviceEnablePeerAccess");
}
bool can_reach(int device, int peer) {
  int can = device == peer;
  if (!can) gpu::check(cudaDeviceCanAccessPeer(&can, device, peer), "cudaDeviceCanAccessPeer");
  return can != 0;
}

}  // namespace purlin
