// The exchange of small values before a group is connected, through its torch.distributed store.
#pragma once

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bootstrap.h"
#include "transport.h"

namespace tide {

class StoreBootstrap : public Bootstrap {
 public:
  StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout)
      : store_(std::move(store)), timeout_(timeout) {}
  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key) override {
    store_->wait({key}, timeout_);
    const auto bytes = store_->get(key);
    return {bytes.begin(), bytes.end()};
  }
  // Asks again and again: a wait of the store that is cut short warns each time.
  std::string await(const std::string& key, const std::function<void()>& tick) override {
    constexpr std::chrono::microseconds kShortest(200), kLongest(20000);
    const auto end = Clock::now() + timeout_;
    auto pause = kShortest;
    auto ticked = Clock::now();
    while (!store_->check({key})) {
      const auto now = Clock::now();
      if (now >= end) {
        throw std::runtime_error("no answer in the store within " + std::to_string(timeout_.count()) + " ms");
      }
      if (now - ticked >= std::chrono::milliseconds(100)) {
        tick();
        ticked = now;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, kLongest);
    }
    return get(key);
  }
  bool has(const std::string& key) override { return store_->check({key}); }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds timeout_;
};

}  // namespace tide
