// Groups that raise instead of ending the process, what their watchdogs say, and a small all-gather to fail in.
#pragma once

#include "cuda_rank.h"

namespace tide::test {

inline std::shared_ptr<const ParameterLayout> layout(int world, std::vector<int64_t> shards = {900, 3}) {
  return std::make_shared<ParameterLayout>(world, std::move(shards), std::vector<int64_t>(), 256);
}

// One all-gather with the shard in place; the result is not looked at.
inline Selection gather(CudaRank& me, const Window& window) {
  const auto how = layout(me.world());
  return me.run(me.all_gather(how, me.transport()->device_arena().address(window), nullptr));
}

inline int64_t bytes(int world) { return layout(world)->total_gathered_numel() * 2; }

// What the watchdog said, and how often.
struct Reports {
  std::mutex mutex;
  std::string text;
  int count = 0;

  std::string wait(std::chrono::milliseconds time) {
    const auto end = Clock::now() + time;
    while (Clock::now() < end) {
      std::this_thread::sleep_for(1ms);
      std::lock_guard<std::mutex> lock(mutex);
      if (count > 0) return text;
    }
    throw std::runtime_error("no report");
  }
};

// The group raises instead of ending the process: reports are noted, the engine is told, waits are released.
struct Raising {
  std::shared_ptr<Reports> reports = std::make_shared<Reports>();
  std::shared_ptr<std::weak_ptr<Engine>> engine = std::make_shared<std::weak_ptr<Engine>>();

  Settings settings() const {
    Settings s;
    s.on_timeout = [reports = reports, engine = engine](const std::string& text) {
      if (auto known = engine->lock()) known->abort(text);
      std::lock_guard<std::mutex> lock(reports->mutex);
      reports->text = text;
      ++reports->count;
    };
    return s;
  }
  void watch(CudaRank& me) const { *engine = me.shared_engine(); }
};

inline bool drained(cuda::Stream stream, std::chrono::milliseconds time) {
  const auto end = Clock::now() + time;
  while (cuda::driver().stream_query(stream) != 0) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

}  // namespace tide::test
