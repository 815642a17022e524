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

// What a new thread needs before its first call of the driver.
void enter_driver(void* context) {
  driver().set_context(context);
  int mode = kCaptureThreadLocal;
  driver().exchange_capture_mode(&mode);
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
  try {
    thread_ = std::thread([this] { run(); });
    query_thread_ = std::thread([this] { run_queries(); });
  } catch (...) {
    stop();
    throw;
  }
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
  for (std::thread* thread : {&thread_, &query_thread_}) {
    if (thread->joinable()) thread->join();
  }
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
    // From the newest: hundreds of short calls may have been given to the device since the last look.
    for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
      if (entry->channel != channel || entry->sequence != sequence || entry->event) continue;
      entry->event = event;
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
  enter_driver(context_);
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
    look_at_flags(lock);
  }
}

void Watchdog::run_queries() {
  enter_driver(context_);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    if (entries_.empty()) {
      changed_.wait(lock);
      continue;
    }
    if (changed_.wait_for(lock, kTick, [this] { return stopping_; })) return;
    look_at_device(lock);
  }
}

// Says what the driver said when it was neither "done" nor "not yet". Releases the lock around the driver's calls: this
// thread alone takes entries with an event away.
std::string Watchdog::drop_finished(std::unique_lock<std::mutex>& lock) {
  std::vector<Entry> asked, over;
  for (const Entry& entry : entries_) {
    if (entry.event) asked.push_back(entry);
  }
  lock.unlock();
  std::string failure;
  for (const Entry& entry : asked) {
    const Result result = driver().event_query(entry.event);
    if (result == kNotReady) continue;
    // The process may be ending: then there is nothing left to look after, and nothing to say.
    if (result != 0 && result != kDeinitialized && result != kContextDestroyed) {
      failure = error_text(result);
    } else {
      over.push_back(entry);
    }
  }
  lock.lock();
  for (const Entry& done : over) {
    entries_.erase(
        std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.event == done.event; }));
  }
  lock.unlock();
  for (const Entry& done : over) {
    callbacks_.finished(done.channel, done.sequence);
    driver().event_destroy(done.event);
  }
  lock.lock();
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

// The flags that are awaited are those of the newest call.
void Watchdog::look_at_flags(std::unique_lock<std::mutex>& lock) {
  if (reported_ || ask(oldest(), Doubt::none, "", lock)) return;
  ask(newest_late(), Doubt::overdue, "", lock);
}

void Watchdog::look_at_device(std::unique_lock<std::mutex>& lock) {
  const std::string failure = drop_finished(lock);
  if (reported_) return;
  if (failure.empty()) {
    ask(oldest_late(), Doubt::late, "", lock);
  } else {
    ask(oldest(), Doubt::none, failure, lock);
  }
}

// Once, whichever thread comes first.
void Watchdog::report(const std::string& text, std::unique_lock<std::mutex>& lock) {
  if (reported_) return;
  reported_ = true;
  lock.unlock();
  callbacks_.report(text);
  lock.lock();
}

}  // namespace tide::cuda
