// Looks after calls that are on a stream: a device wait has no deadline of its own.
//
// When a call is not over at its deadline, or a peer is gone, `report` is called once with the text that names who is
// missing and what each did last. By default that ends the process, before any wait is released: a released wait
// would let the optimizer run on garbage.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "../transport.h"
#include "driver.h"

namespace tide::cuda {

class Watchdog {
 public:
  // diagnose(channel, sequence): "" while nothing points to a failure, else who is missing; `late` says that the
  // deadline has passed, and then it must not be "".
  using Diagnose = std::function<std::string(Channel channel, uint64_t sequence, bool late)>;
  using Report = std::function<void(const std::string&)>;

  Watchdog(Diagnose diagnose, Report report);
  ~Watchdog();

  // `event` (owned from now on) is recorded behind the call on its stream.
  void watch(Channel channel, uint64_t sequence, Event event, Clock::time_point deadline);
  // Calls still under way.
  size_t outstanding();
  void stop();

 private:
  struct Entry {
    Channel channel;
    uint64_t sequence;
    Event event;
    Clock::time_point deadline;
  };
  void run();
  void look(std::unique_lock<std::mutex>& lock);

  Diagnose diagnose_;
  Report report_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  bool stopping_ = false;
  bool reported_ = false;
  void* context_ = nullptr;  // of the thread that made the watchdog
  std::thread thread_;
};

}  // namespace tide::cuda
