// What ran and why: a ring of the last calls and totals by (operation, path, reason).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "select.h"

namespace tide {

enum class CallState : uint8_t { waiting, running, done, failed };
const char* to_string(CallState state);

struct Call {
  uint64_t id = 0;  // in this recorder
  Channel op = Channel::all_gather;
  uint64_t sequence = 0;
  Path path = Path::local;
  std::string reason;
  std::string label;
  std::string text;
  int64_t bytes = 0;          // of the gathered, or not yet scattered, buffer
  int64_t repair_copies = 0;  // tensors copied because they were not contiguous
  int64_t kernel_copies = 0;  // pieces so small and so many that a kernel moved them, not the copy engines
  std::string repair_reason;  // which, and why they could not be taken as they lie
  CallState state = CallState::waiting;
  double started = 0, finished = 0;  // seconds, steady clock
};

struct Totals {
  int64_t calls = 0, bytes = 0, repair_copies = 0, kernel_copies = 0;
  double seconds = 0;
};

class Recorder {
 public:
  explicit Recorder(size_t capacity) : capacity_(capacity) {}

  uint64_t begin(Call call);
  void update(uint64_t id, Path path, const std::string& reason);
  void note_copies(uint64_t id, int64_t copies, const std::string& why);
  void note_kernel_copies(uint64_t id, int64_t copies);
  void end(uint64_t id, bool failed);

  std::vector<Call> recent() const;
  using Key = std::tuple<Channel, Path, std::string>;
  using TotalsByKey = std::map<Key, Totals, std::less<>>;  // found by references too: no string is copied per call
  TotalsByKey totals() const;
  void reset();

 private:
  Call* find(uint64_t id);

  mutable std::mutex mutex_;
  size_t capacity_;
  uint64_t next_ = 1;
  std::deque<Call> ring_;
  TotalsByKey totals_;
};

double steady_seconds();

}  // namespace tide
