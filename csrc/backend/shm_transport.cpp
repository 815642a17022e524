#include "shm_transport.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iomanip>
#include <mutex>
#include <sstream>
#include <thread>

#include "../kernels/copy.h"
#include "fork_guard.h"
#include "futex.h"
#include "memory_limit.h"
#include "shm_arena.h"
#include "shm_handshake.h"
#include "shm_table.h"

namespace tide {
namespace {

using std::chrono::milliseconds;

// How often a waiting rank looks up: for the caller's interrupt, dead peers and the deadline.
constexpr milliseconds kTick{100};
// Looks at what is awaited before a rank sleeps: a few, between which others may run; before these, more in a row where
// there are two cores for every rank, because waking up takes longer than most ranks are late.
constexpr int kChecksBeforeSleep = 4;
constexpr std::chrono::microseconds kSpin{50};

// How long a rank of `world` on this machine looks without a pause. Not at all where that cannot be told: the call
// fails on machines of more cores than the set holds.
Clock::duration spinning(int world) {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0 || CPU_COUNT(&cores) < 2 * world) return Clock::duration::zero();
  return kSpin;
}

class ShmTransport : public Transport, public SharedTables {
 public:
  ShmTransport(const Speaker& who, Segment table, std::shared_ptr<ShmArena> arena, std::vector<Peer> peers)
      : who_(who),
        spin_(spinning(who.world)),
        own_memory_(std::move(table)),
        arena_(std::move(arena)),
        peers_(std::move(peers)) {
    for (int rank = 0; rank < who_.world; ++rank) {
      const Segment& memory = rank == who_.rank ? own_memory_ : peers_[index(rank)].table;
      tables_.emplace_back(memory.data(), who_.world);
    }
  }

  // A peer that still waits for this rank learns at once that it has left.
  ~ShmTransport() override {
    if (guard_.in_child()) return;
    if (own().state() == RankState::open) leave(RankState::closed, "");
  }

  const char* name() const override { return "shm"; }
  int rank() const override { return who_.rank; }
  int world() const override { return who_.world; }
  std::shared_ptr<Arena> arena() override { return arena_; }

  std::vector<std::string> exchange(Channel channel, uint64_t sequence, const std::string& mine,
                                    const Wait& wait) override;
  void complete(Channel channel, uint64_t sequence) override;
  std::byte* address(int rank, int64_t offset, int64_t bytes) override;
  void copy(Channel, std::byte* to, const std::byte* from, int64_t bytes) override;
  void copy_rows(Channel, std::byte* to, const std::byte* from, const Rows& rows) override;
  void place_rows(Channel channel, std::byte* to, const std::byte* from, const Rows& rows) override {
    copy_rows(channel, to, from, rows);
  }
  void fill(Channel, std::byte* to, int64_t bytes) override { std::memset(to, 0, static_cast<size_t>(bytes)); }
  void accumulate(Channel, ElementType in, ElementType out, const AccumulateArgs& args) override {
    tide::accumulate(in, out, args);
  }
  void signal(Channel channel, int peer, Flag flag, uint64_t value) override;
  void wait(Channel channel, int peer, Flag flag, uint64_t value, const Wait& wait) override;
  void check_peers(const std::string& call) override;
  void abort(const std::string& reason) override;

  std::pair<std::byte*, int64_t> table_memory(int owner) override {
    const Segment& memory = owner == who_.rank ? own_memory_ : peers_[index(owner)].table;
    return {memory.data(), memory.bytes()};
  }
  std::atomic<uint64_t>& flag_word(int owner, Channel channel, Flag flag, int source) override {
    return table(owner).flag(channel, flag, source).value;
  }
  std::string lost(int rank) const override;
  std::string last_calls(int rank) override { return name_of(rank) + " (" + table(rank).last_calls() + ")"; }

 private:
  static size_t index(int rank) { return static_cast<size_t>(rank); }
  const Table& own() const { return tables_[index(who_.rank)]; }
  const Table& table(int rank) const { return tables_[index(rank)]; }

  void check_usable(const std::string& call) const;
  void check_rank(int rank, const std::string& call) const;
  bool is_peers(const std::byte* to) const;
  void leave(RankState state, const std::string& reason);
  std::string name_of(int rank) const;

  // Sleeps until `arrived(rank)` holds for every rank of `missing`. `bell_of(rank)` is rung when that may
  // have changed, `goal(rank)` says what is awaited.
  template <class Arrived, class BellOf, class Goal>
  void await(std::vector<int> missing, const Wait& wait, Arrived arrived, BellOf bell_of, Goal goal) const;
  template <class Goal>
  std::string timeout_text(Clock::duration waited, const std::vector<int>& missing, Goal goal) const;

  const Speaker who_;
  const Clock::duration spin_;
  const ForkGuard guard_;
  const Segment own_memory_;
  const std::shared_ptr<ShmArena> arena_;
  const std::vector<Peer> peers_;
  std::vector<Table> tables_;
  std::mutex leaving_;
};

void ShmTransport::check_usable(const std::string& call) const {
  if (guard_.in_child())
    fail(ErrorKind::usage, who_, call, "the group was made before fork(); make a new group in the child process");
  if (own().state() == RankState::aborted)
    fail(ErrorKind::peer, who_, call,
         "the group was aborted: " + own().reason() + "; destroy the group and make a new one");
}

void ShmTransport::check_rank(int rank, const std::string& call) const {
  if (rank < 0 || rank >= who_.world)
    fail(ErrorKind::usage, who_, call,
         "got rank " + std::to_string(rank) + ", expected 0 to " + std::to_string(who_.world - 1));
}

std::vector<std::string> ShmTransport::exchange(Channel channel, uint64_t sequence, const std::string& mine,
                                                const Wait& wait) {
  check_usable(wait.call);
  if (static_cast<int64_t>(mine.size()) > kRecordBytes)
    fail(
        ErrorKind::usage, who_, wait.call,
        "a call record of " + std::to_string(mine.size()) + " bytes; at most " + std::to_string(kRecordBytes) + " fit");
  own().publish(channel, sequence, mine);
  std::vector<int> missing;
  for (int step = 1; step < who_.world; ++step) {
    missing.push_back((who_.rank + step) % who_.world);
  }
  std::vector<std::string> records(static_cast<size_t>(who_.world));
  records[index(who_.rank)] = mine;
  const auto arrived = [&](int peer) {
    // In this order: while this rank has not published the next call, no peer that takes part in this one can
    // have gone beyond it and reused its record.
    const auto published = table(peer).published(channel);
    if (auto record = table(peer).record(channel, sequence)) {
      records[index(peer)] = std::move(*record);
      return true;
    }
    if (published && *published > sequence)
      fail(ErrorKind::peer, who_, wait.call,
           name_of(peer) + " is at " + to_string(channel) + " #" + std::to_string(*published) + ", this rank at #" +
               std::to_string(sequence) + "; the ranks made different calls on this group");
    return false;
  };
  await(
      missing, wait, arrived, [&](int peer) -> Bell& { return table(peer).published_bell(channel); },
      [&](int) { return "its record of call #" + std::to_string(sequence); });
  return records;
}

void ShmTransport::complete(Channel channel, uint64_t sequence) {
  if (!guard_.in_child()) own().complete(channel, sequence);
}

std::byte* ShmTransport::address(int rank, int64_t offset, int64_t bytes) {
  check_rank(rank, "");
  const int64_t size = rank == who_.rank ? arena_->bytes() : peers_[index(rank)].arena.bytes();
  if (offset < 0 || bytes < 0 || bytes > size || offset > size - bytes)
    fail(ErrorKind::usage, who_, "",
         "bytes [" + std::to_string(offset) + ", " + std::to_string(offset + bytes) +
             ") are not in the segment of rank " + std::to_string(rank) + ", which has " + std::to_string(size) +
             " bytes");
  return (rank == who_.rank ? arena_->data() : peers_[index(rank)].arena.data()) + offset;
}

bool ShmTransport::is_peers(const std::byte* to) const {
  return std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
    const auto start = reinterpret_cast<uintptr_t>(peer.arena.data());
    return reinterpret_cast<uintptr_t>(to) - start < static_cast<uintptr_t>(peer.arena.bytes());
  });
}

void ShmTransport::copy(Channel, std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes <= 0) return;
  if (is_peers(to)) {
    push_bytes(to, from, bytes);
  } else {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

void ShmTransport::copy_rows(Channel, std::byte* to, const std::byte* from, const Rows& rows) {
  const auto move = is_peers(to) ? push_rows : tide::copy_rows;
  move(to, from, rows.rows, rows.bytes, rows.to_pitch, rows.from_pitch);
}

void ShmTransport::signal(Channel channel, int peer, Flag flag, uint64_t value) {
  if (flag == Flag::ready) return;  // exchange() has said it
  check_usable("");
  check_rank(peer, "");
  FlagWord& word = table(peer).flag(channel, flag, who_.rank);
  word.value.store(value, std::memory_order_seq_cst);
  ring(word.bell);
}

void ShmTransport::wait(Channel channel, int peer, Flag flag, uint64_t value, const Wait& wait) {
  if (flag == Flag::ready) return;
  check_usable(wait.call);
  check_rank(peer, wait.call);
  FlagWord& word = own().flag(channel, flag, peer);
  const auto arrived = [&](int) { return word.value.load(std::memory_order_seq_cst) >= value; };
  if (arrived(peer)) return;
  await(
      {peer}, wait, arrived, [&](int) -> Bell& { return word.bell; },
      [&](int) {
        return std::string("its ") + to_string(flag) + " flag to reach " + std::to_string(value) + " (it is at " +
               std::to_string(word.value.load(std::memory_order_relaxed)) + ")";
      });
}

template <class Arrived, class BellOf, class Goal>
void ShmTransport::await(std::vector<int> missing, const Wait& wait, Arrived arrived, BellOf bell_of, Goal goal) const {
  const auto look = [&] {
    missing.erase(std::remove_if(missing.begin(), missing.end(), arrived), missing.end());
    return missing.empty();
  };
  const auto start = Clock::now();
  while (Clock::now() - start < spin_) {
    if (look()) return;
  }
  for (int i = 0; i < kChecksBeforeSleep; ++i) {
    if (look()) return;
    std::this_thread::yield();
  }
  auto next_tick = start + kTick;
  for (;;) {
    // Asleep, this rank hears the bell of one missing rank only; the others' changes are seen when it rings.
    const int heard = missing.front();
    Bell& bell = bell_of(heard);
    // The registration comes before the last look, and every change before its ring: see ring().
    bell.waiters.fetch_add(1, std::memory_order_seq_cst);
    const struct Leave {
      Bell& bell;
      ~Leave() { bell.waiters.fetch_sub(1, std::memory_order_relaxed); }
    } leave{bell};
    const uint32_t seen = bell.rings.load(std::memory_order_seq_cst);
    if (look()) return;
    if (missing.front() != heard) continue;  // not to sleep at the wrong bell
    check_usable(wait.call);
    bool someone_left = false;
    for (const int rank : missing) someone_left |= table(rank).state() != RankState::open;
    auto now = Clock::now();
    if (!someone_left && now < next_tick && now < wait.deadline) {
      futex_wait(bell.rings, seen, std::min(next_tick, wait.deadline) - now);
      continue;
    }
    next_tick = now + kTick;
    if (wait.interrupted) wait.interrupted();
    for (const int rank : std::vector<int>(missing)) {
      const std::string why = lost(rank);
      if (why.empty()) continue;
      if (look()) return;  // it delivered before it left
      if (std::find(missing.begin(), missing.end(), rank) == missing.end()) continue;
      fail(ErrorKind::peer, who_, wait.call,
           why + " while this rank waited for " + goal(rank) + " (" + table(rank).last_calls() + ")");
    }
    now = Clock::now();
    if (now >= wait.deadline && !look())
      fail(ErrorKind::timeout, who_, wait.call, timeout_text(now - start, missing, goal));
  }
}

std::string ShmTransport::name_of(int rank) const {
  const std::string name = "rank " + std::to_string(rank);
  return rank == who_.rank ? name : name + " (pid " + std::to_string(peers_[index(rank)].pid) + ")";
}

std::string ShmTransport::lost(int rank) const {
  if (rank == who_.rank) return "";
  switch (table(rank).state()) {
    case RankState::aborted:
      return name_of(rank) + " aborted: " + table(rank).reason() + ";";
    case RankState::closed:
      return name_of(rank) + " left the group";
    case RankState::open:
      break;
  }
  const Peer& peer = peers_[index(rank)];
  return is_gone(peer.socket, peer.pidfd) ? name_of(rank) + " exited" : "";
}

template <class Goal>
std::string ShmTransport::timeout_text(Clock::duration waited, const std::vector<int>& missing, Goal goal) const {
  std::ostringstream text;
  text << "waited " << std::fixed << std::setprecision(1) << std::chrono::duration<double>(waited).count() << " s for ";
  for (size_t i = 0; i < missing.size(); ++i)
    text << (i == 0 ? "" : ", ") << name_of(missing[i]) << " (" << table(missing[i]).last_calls() << ")";
  text << ": " << goal(missing.front());
  for (int rank = 0; rank < who_.world; ++rank) {
    if (std::find(missing.begin(), missing.end(), rank) != missing.end()) continue;
    if (const std::string why = lost(rank); !why.empty()) text << "; meanwhile " << why;
  }
  // A reason of another rank ends with a semicolon of its own.
  text << (text.str().back() == ';' ? "" : ";") << " look at " << (missing.size() == 1 ? "that rank" : "those ranks")
       << " or set a longer timeout";
  return text.str();
}

void ShmTransport::check_peers(const std::string& call) {
  check_usable(call);
  for (int rank = 0; rank < who_.world; ++rank) {
    if (table(rank).state() != RankState::aborted) continue;
    fail(ErrorKind::peer, who_, call,
         lost(rank) + " it will not take part in this call; destroy the group and make a new one");
  }
}

void ShmTransport::abort(const std::string& reason) {
  if (guard_.in_child()) return;
  leave(RankState::aborted, reason);
}

void ShmTransport::leave(RankState state, const std::string& reason) {
  const std::lock_guard<std::mutex> lock(leaving_);
  if (own().state() != RankState::open) return;  // the first reason stands
  own().leave(state, reason);
  // Whoever waits for this rank, and this rank's own threads, which may wait for any peer.
  for (int i = 0; i < kChannels; ++i) {
    const auto channel = static_cast<Channel>(i);
    for (int peer = 0; peer < who_.world; ++peer) {
      ring(table(peer).published_bell(channel));
      for (int flag = 0; flag < kFlags; ++flag) {
        ring(table(peer).flag(channel, static_cast<Flag>(flag), who_.rank).bell);
        ring(own().flag(channel, static_cast<Flag>(flag), peer).bell);
      }
    }
  }
}

}  // namespace

void decline_shm(const Speaker& who, Bootstrap& bootstrap, const std::string& why) {
  decline_handshake(bootstrap, who.rank, why);
}

ShmResult connect_shm(const Speaker& who, Bootstrap& bootstrap, const ShmOptions& options) {
  Handshake handshake(who, bootstrap, options.handshake_timeout, options.interrupted);
  const int64_t table_bytes = Table::bytes(who.world);
  Fd table_memfd;
  Segment table;
  std::shared_ptr<ShmArena> arena;
  std::string failure;
  try {
    if (!options.refusal.empty()) throw ShmUnavailable(options.refusal);
    const int64_t wanted = options.arena_bytes > 0 ? options.arena_bytes : memory_bound();
    const int64_t arena_bytes = mappable_bytes(wanted, who.world);
    table_memfd = create_memfd("tide-table", table_bytes);
    table = Segment(table_memfd, table_bytes);
    arena = std::make_shared<ShmArena>(create_memfd("tide-arena", arena_bytes), arena_bytes, who.world);
  } catch (const ShmUnavailable& error) {
    failure = error.what();
    table_memfd.reset();  // the store may need the descriptors
    arena.reset();
  }
  std::vector<Peer> peers;
  try {
    if (std::string reason = handshake.meet(failure); !reason.empty()) return {nullptr, reason, nullptr};
    try {
      handshake.swap(Offer{table_memfd, arena->memfd(), table_bytes, arena->bytes()}, &peers);
    } catch (const ShmUnavailable& error) {
      failure = error.what();
    }
    if (std::string reason = handshake.agree(failure, peers); !reason.empty()) return {nullptr, reason, nullptr};
  } catch (const std::exception& error) {
    handshake.give_up(error.what());
    throw;
  }
  auto transport = std::make_shared<ShmTransport>(who, std::move(table), std::move(arena), std::move(peers));
  return {transport, "", transport};
}

}  // namespace tide
