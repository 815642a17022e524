#include "lane.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace tide {

Lane::Lane() : owner_(getpid()) {}

Lane::~Lane() {
  stop();
  if (owner_ != getpid()) turn_.release();
}

uint64_t Lane::take_ticket() {
  std::lock_guard<std::mutex> lock(mutex_);
  return next_++;
}

uint64_t Lane::pass() {
  const uint64_t ticket = take_ticket();
  finish(ticket);
  return ticket;
}

void Lane::finish(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (serving_ != ticket) {
    given_up_.push_back(ticket);
    return;
  }
  ++serving_;
  // Calls behind this one that were given up while they waited for their turn.
  for (auto it = given_up_.begin(); it != given_up_.end();) {
    if (*it == serving_) {
      ++serving_;
      given_up_.erase(it);
      it = given_up_.begin();
    } else {
      ++it;
    }
  }
  turn_->notify_all();
}

void Lane::run(uint64_t ticket, const std::function<void()>& job, const std::function<void()>& interrupted) {
  struct Finish {
    Lane* lane;
    uint64_t ticket;
    ~Finish() { lane->finish(ticket); }
  } finish_at_end{this, ticket};
  std::unique_lock<std::mutex> lock(mutex_);
  while (serving_ != ticket) {
    if (turn_->wait_for(lock, std::chrono::milliseconds(100)) == std::cv_status::timeout && interrupted) {
      lock.unlock();
      interrupted();
      lock.lock();
    }
  }
  lock.unlock();
  job();
}

void Lane::post(uint64_t ticket, std::function<void()> job) {
  std::lock_guard<std::mutex> lock(mutex_);
  jobs_.emplace_back(ticket, std::move(job));
  if (!thread_) thread_ = std::make_unique<std::thread>([this] { work(); });
  turn_->notify_all();
}

void Lane::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    turn_->wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    auto [ticket, job] = std::move(jobs_.front());
    jobs_.pop_front();
    turn_->wait(lock, [this, t = ticket] { return serving_ == t; });
    lock.unlock();
    job();
    job = nullptr;  // tensors held by the call go before the next one starts
    finish(ticket);
    lock.lock();
  }
}

void Lane::stop() {
  if (!thread_) return;
  if (owner_ != getpid()) {
    thread_.release();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    turn_->notify_all();
  }
  thread_->join();
  thread_.reset();
}

}  // namespace tide
