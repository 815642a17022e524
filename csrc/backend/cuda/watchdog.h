// Looks after calls that are on a stream, and after host calls into NCCL: neither has a deadline of its own.
//
// When a call is not over at its deadline, a peer is gone or the device has failed, `report` is called once with the
// text that names who is missing and what each did last. By default that ends the process, before any wait is
// released: a released wait would let the optimizer run on garbage.
//
// Two threads: one reads clocks and flags and needs no driver, the other asks the driver which calls are over. Whoever
// holds the driver's lock (a full queue, a kernel being loaded, tide's or anybody's) may wait for the very flags that
// the first one has to say are missing.
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

// What the watchdog knows of a call that it asks about.
enum class Doubt {
  none,     // nothing: is a peer gone?
  overdue,  // the channel's newest call is past its deadline, whether it is over is not known: does a peer owe flags?
  late,     // it is past its deadline and not over
};

class Watchdog {
 public:
  struct Callbacks {
    // "" while nothing points to a failure, else who is missing; not "" for a call that is late, or if the driver has
    // failed. `failure`: what the driver said, or "".
    std::function<std::string(Channel channel, uint64_t sequence, Doubt doubt, const std::string& failure)> diagnose;
    std::function<void(const std::string&)> report;
    std::function<void(Channel channel, uint64_t sequence)> finished;
    // Ends the device's waits; false when there is nothing left to end. Called every 100 ms from half a second after
    // keep_releasing() on: what then runs here tells peers of data that never came, so they must have noticed before.
    std::function<bool()> release;
  };

  explicit Watchdog(Callbacks callbacks);
  ~Watchdog();

  // The call is being put on its streams, and the host may be blocked at that: by a full queue, or because a kernel is
  // loaded, which waits for the device. watch() of the same call follows.
  void begin(Channel channel, uint64_t sequence, Clock::time_point deadline);
  // `event` (owned from now on) is recorded behind the call on its stream.
  void watch(Channel channel, uint64_t sequence, Event event, Clock::time_point deadline);
  void keep_releasing();
  // Calls still under way.
  size_t outstanding();
  void stop();
  bool is_this_thread() const {
    const auto id = std::this_thread::get_id();
    return id == thread_.get_id() || id == query_thread_.get_id();
  }

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
    Event event;  // null: a host call, or not all of it is on the stream yet
    Clock::time_point deadline;
  };
  void run();
  void run_queries();
  void look_at_flags(std::unique_lock<std::mutex>& lock);
  void look_at_device(std::unique_lock<std::mutex>& lock);
  void report(const std::string& text, std::unique_lock<std::mutex>& lock);
  std::vector<Entry> oldest() const;
  std::vector<Entry> oldest_late() const;
  std::vector<Entry> newest_late() const;
  bool ask(const std::vector<Entry>& entries, Doubt doubt, const std::string& failure,
           std::unique_lock<std::mutex>& lock);
  std::string drop_finished(std::unique_lock<std::mutex>& lock);
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
  std::thread thread_, query_thread_;
};

}  // namespace tide::cuda
