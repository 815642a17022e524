#include "shm_table.h"

#include <algorithm>
#include <cstring>

#include "futex.h"

namespace tide {

struct Table::Layout {
  std::atomic<uint32_t> state;
  char reason[1020];
  Journal journals[kChannels];
  Record records[kChannels][2];
  // FlagWord flags[kChannels][kFlags][world] follows.
  FlagWord* flags() { return reinterpret_cast<FlagWord*>(this + 1); }
};

namespace {

int index(Channel channel) { return static_cast<int>(channel); }

// The printable text before the first zero byte: by convention a record starts with a line for people.
std::string description(const std::string& record) {
  std::string text = record.substr(0, std::min<size_t>(record.find('\0'), 160));
  const auto printable = [](char c) { return c >= ' ' && c <= '~'; };
  return std::all_of(text.begin(), text.end(), printable) ? text : "";
}

}  // namespace

int64_t Table::bytes(int world) {
  const int64_t exact = static_cast<int64_t>(sizeof(Layout) + sizeof(FlagWord) * kChannels * kFlags * world);
  return (exact + 4095) / 4096 * 4096;
}

Table::Table(std::byte* memory, int world) : layout_(reinterpret_cast<Layout*>(memory)), world_(world) {}

Bell& Table::published_bell(Channel channel) const { return layout_->journals[index(channel)].bell; }

FlagWord& Table::flag(Channel channel, Flag flag, int source) const {
  const int position = (index(channel) * kFlags + static_cast<int>(flag)) * world_ + source;
  return layout_->flags()[position];
}

// Two records per channel suffice: a rank publishes call n+2 only after it has seen every peer's record of
// n+1, and each peer published that only after it had read everybody's record of n. So nobody still reads the
// record of n when n+2 takes its place. A rank that gave a call up (timeout) breaks that order; the zero
// sequence around the write and the second look in record() keep a reader from taking a mixed text even then.
void Table::publish(Channel channel, uint64_t sequence, const std::string& text) const {
  Record& record = layout_->records[index(channel)][sequence & 1];
  record.sequence.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(record.text, text.data(), text.size());
  record.length.store(static_cast<uint32_t>(text.size()), std::memory_order_relaxed);
  record.sequence.store(sequence + 1, std::memory_order_release);
  layout_->journals[index(channel)].published.store(sequence + 1, std::memory_order_seq_cst);
  ring(published_bell(channel));
}

void Table::complete(Channel channel, uint64_t sequence) const {
  layout_->journals[index(channel)].completed.store(sequence + 1, std::memory_order_release);
}

void Table::leave(RankState state, const std::string& reason) const {
  const size_t length = std::min(reason.size(), sizeof(layout_->reason) - 1);
  std::memcpy(layout_->reason, reason.data(), length);
  layout_->reason[length] = '\0';
  layout_->state.store(static_cast<uint32_t>(state), std::memory_order_seq_cst);
}

std::optional<std::string> Table::record(Channel channel, uint64_t sequence) const {
  const Record& record = layout_->records[index(channel)][sequence & 1];
  if (record.sequence.load(std::memory_order_seq_cst) != sequence + 1) return std::nullopt;
  const size_t length = record.length.load(std::memory_order_relaxed);
  std::string text(record.text, std::min(length, sizeof(record.text)));
  std::atomic_thread_fence(std::memory_order_acquire);
  if (record.sequence.load(std::memory_order_relaxed) != sequence + 1) return std::nullopt;
  return text;
}

std::optional<uint64_t> Table::published(Channel channel) const {
  const uint64_t value = layout_->journals[index(channel)].published.load(std::memory_order_seq_cst);
  if (value == 0) return std::nullopt;
  return value - 1;
}

RankState Table::state() const { return static_cast<RankState>(layout_->state.load(std::memory_order_seq_cst)); }

std::string Table::reason() const {
  return std::string(layout_->reason, strnlen(layout_->reason, sizeof(layout_->reason)));
}

std::string Table::last_calls() const {
  std::string text;
  for (int i = 0; i < kChannels; ++i) {
    const auto channel = static_cast<Channel>(i);
    const auto sequence = published(channel);
    if (!sequence) continue;
    const bool done = layout_->journals[i].completed.load(std::memory_order_acquire) == *sequence + 1;
    const std::string what = description(record(channel, *sequence).value_or(""));
    text += (text.empty() ? "last " : "; ") + std::string(to_string(channel)) + ": #" + std::to_string(*sequence);
    text += (what.empty() ? "" : " (" + what + ")") + std::string(done ? ", done" : ", in progress");
  }
  return text.empty() ? "no call yet" : text;
}

void ring(Bell& bell) {
  // Both sequentially consistent, as the waiter's registration and its load of `rings` are: either this load
  // sees the waiter, or the waiter's look at the changed word comes after the change.
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  if (bell.waiters.load(std::memory_order_seq_cst) != 0) futex_wake_all(bell.rings);
}

}  // namespace tide
