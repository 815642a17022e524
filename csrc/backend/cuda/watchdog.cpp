#include "watchdog.h"

#include <algorithm>

namespace tide::cuda {

namespace {

constexpr auto kTick = std::chrono::milliseconds(100);
constexpr auto kNotice = 5 * kTick;

std::string error_text(Result result) {
  try {
    check(result, "cuEventQuery");
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

Watchdog::Watchdog(Callbacks callbacks) : callbacks_(std::move(callbacks)) {
  check(driver().get_context(&context_), "cuCtxGetCurrent");
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  stop();
  for (const Entry& entry : entries_) {
    if (entry.event) driver().event_destroy(entry.event);
  }
}

void Watchdog::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Watchdog::add(const Entry& entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_.push_back(entry);
  if (entries_.size() == 1) changed_.notify_all();
}

void Watchdog::watch(Channel channel, uint64_t sequence, Event event, Clock::time_point deadline) {
  add({channel, sequence, event, deadline});
}

Watchdog::HostCall::HostCall(Watchdog& watchdog, uint64_t sequence, Clock::time_point deadline) : watchdog_(watchdog) {
  watchdog_.add({Channel::memory, sequence, nullptr, deadline});
}

Watchdog::HostCall::~HostCall() {
  std::lock_guard<std::mutex> lock(watchdog_.mutex_);
  auto& entries = watchdog_.entries_;
  entries.erase(std::find_if(entries.begin(), entries.end(), [](const Entry& entry) { return !entry.event; }));
}

void Watchdog::keep_releasing() {
  std::lock_guard<std::mutex> lock(mutex_);
  releasing_ = true;
  release_from_ = Clock::now() + kNotice;
  changed_.notify_all();
}

size_t Watchdog::outstanding() {
  std::lock_guard<std::mutex> lock(mutex_);
  return entries_.size();
}

void Watchdog::run() {
  driver().set_context(context_);
  int mode = kCaptureThreadLocal;
  driver().exchange_capture_mode(&mode);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    if (entries_.empty() && !releasing_) {
      changed_.wait(lock);
      continue;
    }
    if (releasing_ && Clock::now() >= release_from_) {
      lock.unlock();
      const bool more = callbacks_.release();
      lock.lock();
      releasing_ = more;
    }
    if (changed_.wait_for(lock, kTick, [this] { return stopping_; })) return;
    look(lock);
  }
}

// Says what the driver said when it was neither "done" nor "not yet".
std::string Watchdog::drop_finished() {
  std::string failure;
  for (auto it = entries_.begin(); it != entries_.end();) {
    const Result result = it->event ? driver().event_query(it->event) : kNotReady;
    if (result == kNotReady) {
      ++it;
      continue;
    }
    // The process may be ending: then there is nothing left to look after, and nothing to say.
    if (result != 0 && result != kDeinitialized && result != kContextDestroyed) {
      failure = error_text(result);
      ++it;
      continue;
    }
    driver().event_destroy(it->event);
    callbacks_.finished(it->channel, it->sequence);
    it = entries_.erase(it);
  }
  return failure;
}

// Of each channel the oldest call, or with `late` the first that is past its deadline. With the lock held.
std::vector<Watchdog::Entry> Watchdog::suspects(bool late) const {
  const auto now = Clock::now();
  std::vector<Entry> found;
  for (int c = 0; c < kChannels; ++c) {
    const auto suspect = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
      return static_cast<int>(entry.channel) == c && (!late || now > entry.deadline);
    });
    if (suspect != entries_.end()) found.push_back(*suspect);
  }
  return found;
}

// One round over the calls under way; releases the lock around diagnose and report.
void Watchdog::look(std::unique_lock<std::mutex>& lock) {
  if (!reported_) {
    // Dead peers first: that needs no driver, which may be blocked behind a full queue.
    const auto under_way = suspects(false);
    lock.unlock();
    std::string text;
    for (const Entry& e : under_way) {
      if (text.empty()) text = callbacks_.diagnose(e.channel, e.sequence, false, "");
    }
    lock.lock();
    if (!text.empty()) return report(text, lock);
  }
  const std::string failure = drop_finished();
  if (reported_) return;
  const auto candidates = suspects(failure.empty());
  lock.unlock();
  std::string text;
  for (const Entry& e : candidates) {
    if (text.empty()) text = callbacks_.diagnose(e.channel, e.sequence, failure.empty(), failure);
  }
  lock.lock();
  if (!text.empty()) report(text, lock);
}

void Watchdog::report(const std::string& text, std::unique_lock<std::mutex>& lock) {
  reported_ = true;
  lock.unlock();
  callbacks_.report(text);
  lock.lock();
}

}  // namespace tide::cuda
