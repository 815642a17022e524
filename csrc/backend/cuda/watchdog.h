// Looks after calls that are on a stream, and after host calls into NCCL: neither has a deadline of its own.
//
// When a call is not over at its deadline, a peer is gone or the device has failed, `report` is called once with the
// text that names who is missing and what each did last. By default that ends the process, before any wait is
// released: a released wait would let the optimizer run on garbage.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../transport.h"
#include "driver.h"

namespace tide::cuda {

class Watchdog {
 public:
  struct Callbacks {
    // "" while nothing points to a failure, else who is missing; `late` says that the deadline has passed, and then it
    // must not be "". `failure`: what the driver said, or "".
    std::function<std::string(Channel channel, uint64_t sequence, bool late, const std::string& failure)> diagnose;
    std::function<void(const std::string&)> report;
    std::function<void(Channel channel, uint64_t sequence)> finished;
    // Ends the device's waits; false when there is nothing left to end. Called every 100 ms from half a second after
    // keep_releasing() on: what then runs here tells peers of data that never came, so they must have noticed before.
    std::function<bool()> release;
  };

  explicit Watchdog(Callbacks callbacks);
  ~Watchdog();

  // `event` (owned from now on) is recorded behind the call on its stream.
  void watch(Channel channel, uint64_t sequence, Event event, Clock::time_point deadline);
  void keep_releasing();
  // Calls still under way.
  size_t outstanding();
  void stop();

  // A host call that may block for ever, as long as the object lives.
  class HostCall {
   public:
    HostCall(Watchdog& watchdog, uint64_t sequence, Clock::time_point deadline);
    ~HostCall();
    HostCall(const HostCall&) = delete;
    HostCall& operator=(const HostCall&) = delete;

   private:
    Watchdog& watchdog_;
  };

 private:
  struct Entry {
    Channel channel;
    uint64_t sequence;
    Event event;  // null: a host call
    Clock::time_point deadline;
  };
  void run();
  void look(std::unique_lock<std::mutex>& lock);
  void report(const std::string& text, std::unique_lock<std::mutex>& lock);
  std::vector<Entry> suspects(bool late) const;
  std::string drop_finished();
  void add(const Entry& entry);

  const Callbacks callbacks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  bool stopping_ = false;
  bool reported_ = false;
  bool releasing_ = false;
  Clock::time_point release_from_;
  void* context_ = nullptr;  // of the thread that made the watchdog
  std::thread thread_;
};

}  // namespace tide::cuda
