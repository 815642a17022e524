// Keeps the calls of one channel in issue order. A synchronous call runs on its caller's thread, an asynchronous
// one on the lane's own thread, started on first use; either waits until every earlier call of the lane is over.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace tide {

class Lane {
 public:
  Lane();
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // A place in the order; also the call's sequence number, from 1. Every ticket taken must be run once.
  uint64_t take_ticket();

  // Runs `job` here once it is this ticket's turn; exceptions pass through. `interrupted` is called every 100 ms
  // while waiting for the turn; when it throws, the ticket is given up and later calls go on.
  void run(uint64_t ticket, const std::function<void()>& job, const std::function<void()>& interrupted);

  // The same on the lane's thread; `job` must not throw.
  void post(uint64_t ticket, std::function<void()> job);

  // A ticket for a call that takes no turn.
  uint64_t pass();

  // Waits until posted jobs are over (they must have been told to give up) and ends the thread.
  void stop();

 private:
  void work();
  void finish(uint64_t ticket);

  std::mutex mutex_;
  // Left alone in a forked child, as the thread below: destroying it would wait there for the parent's waiting threads.
  std::unique_ptr<std::condition_variable> turn_ = std::make_unique<std::condition_variable>();
  uint64_t next_ = 1, serving_ = 1;
  std::deque<uint64_t> given_up_;
  std::deque<std::pair<uint64_t, std::function<void()>>> jobs_;
  bool stopping_ = false;
  // A raw pointer on purpose where the process was forked: the thread does not exist in the child, and a
  // joinable std::thread would terminate it.
  std::unique_ptr<std::thread> thread_;
  pid_t owner_;
};

}  // namespace tide
