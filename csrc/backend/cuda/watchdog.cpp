#include "watchdog.h"

namespace tide::cuda {

namespace {
constexpr auto kTick = std::chrono::milliseconds(100);
}

Watchdog::Watchdog(Diagnose diagnose, Report report)
    : diagnose_(std::move(diagnose)), report_(std::move(report)) {
  check(driver().get_context(&context_), "cuCtxGetCurrent");
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  stop();
  for (Entry& entry : entries_) driver().event_destroy(entry.event);
}

void Watchdog::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Watchdog::watch(Channel channel, uint64_t sequence, Event event, Clock::time_point deadline) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool idle = entries_.empty();
  entries_.push_back({channel, sequence, event, deadline});
  if (idle) changed_.notify_all();
}

size_t Watchdog::outstanding() {
  std::lock_guard<std::mutex> lock(mutex_);
  return entries_.size();
}

void Watchdog::run() {
  driver().set_context(context_);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    if (entries_.empty()) {
      changed_.wait(lock);
      continue;
    }
    if (changed_.wait_for(lock, kTick, [this] { return stopping_; })) return;
    look(lock);
  }
}

// One round over the calls under way; releases the lock around diagnose and report.
void Watchdog::look(std::unique_lock<std::mutex>& lock) {
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (driver().event_query(it->event) == kNotReady) {
      ++it;
      continue;
    }
    driver().event_destroy(it->event);
    it = entries_.erase(it);
  }
  if (entries_.empty() || reported_) return;
  const Entry oldest = entries_.front();
  lock.unlock();
  const std::string text = diagnose_(oldest.channel, oldest.sequence, Clock::now() > oldest.deadline);
  lock.lock();
  if (text.empty()) return;
  reported_ = true;
  lock.unlock();
  report_(text);
  lock.lock();
}

}  // namespace tide::cuda
