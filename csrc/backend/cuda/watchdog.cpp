#include "watchdog.h"

#include <algorithm>
#include <map>

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

template <typename Map>
auto values(const Map& map) {
  std::vector<typename Map::mapped_type> result;
  for (const auto& [key, value] : map) result.push_back(value);
  return result;
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

void Watchdog::begin(Channel channel, uint64_t sequence, Clock::time_point deadline) {
  add({channel, sequence, nullptr, deadline});
}

void Watchdog::watch(Channel channel, uint64_t sequence, Event event, Clock::time_point deadline) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Entry& entry : entries_) {
      if (entry.channel != channel || entry.sequence != sequence || entry.event) continue;
      entry.event = event;
      return;
    }
  }
  add({channel, sequence, event, deadline});
}

Watchdog::HostCall::HostCall(Watchdog& watchdog, uint64_t sequence, Clock::time_point deadline) : watchdog_(watchdog) {
  watchdog_.add({Channel::memory, sequence, nullptr, deadline});
}

Watchdog::HostCall::~HostCall() {
  std::lock_guard<std::mutex> lock(watchdog_.mutex_);
  auto& entries = watchdog_.entries_;
  entries.erase(std::find_if(entries.begin(), entries.end(),
                             [](const Entry& entry) { return entry.channel == Channel::memory && !entry.event; }));
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

// Of each channel one call at most. With the lock held.
std::vector<Watchdog::Entry> Watchdog::oldest() const {
  std::map<Channel, Entry> found;
  for (const Entry& entry : entries_) found.emplace(entry.channel, entry);
  return values(found);
}

std::vector<Watchdog::Entry> Watchdog::oldest_late() const {
  std::map<Channel, Entry> found;
  for (const Entry& entry : entries_) {
    if (Clock::now() > entry.deadline) found.emplace(entry.channel, entry);
  }
  return values(found);
}

std::vector<Watchdog::Entry> Watchdog::newest_late() const {
  std::map<Channel, Entry> found;
  for (const Entry& entry : entries_) {
    found.erase(entry.channel);
    if (Clock::now() > entry.deadline) found.emplace(entry.channel, entry);
  }
  return values(found);
}

// Reports the first of them that gives reason to. Releases the lock around diagnose and report.
bool Watchdog::ask(const std::vector<Entry>& entries, Doubt doubt, const std::string& failure,
                   std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  std::string text;
  for (const Entry& e : entries) {
    if (text.empty()) text = callbacks_.diagnose(e.channel, e.sequence, doubt, failure);
  }
  lock.lock();
  if (text.empty()) return false;
  report(text, lock);
  return true;
}

// One round over the calls under way.
void Watchdog::look(std::unique_lock<std::mutex>& lock) {
  // First what needs no driver, which may be blocked behind a full queue, or by a kernel that it loads for somebody.
  // The flags that are awaited are those of the newest call.
  if (!reported_ && (ask(oldest(), Doubt::none, "", lock) || ask(newest_late(), Doubt::overdue, "", lock))) return;
  const std::string failure = drop_finished();
  if (reported_) return;
  if (failure.empty()) {
    ask(oldest_late(), Doubt::late, "", lock);
  } else {
    ask(oldest(), Doubt::none, failure, lock);
  }
}

void Watchdog::report(const std::string& text, std::unique_lock<std::mutex>& lock) {
  reported_ = true;
  lock.unlock();
  callbacks_.report(text);
  lock.lock();
}

}  // namespace tide::cuda
