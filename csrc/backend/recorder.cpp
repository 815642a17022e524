#include "recorder.h"

#include <chrono>

namespace tide {

const char* to_string(CallState state) {
  switch (state) {
    case CallState::waiting:
      return "waiting";
    case CallState::running:
      return "running";
    case CallState::done:
      return "done";
    case CallState::failed:
      return "failed";
  }
  return "?";
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

uint64_t Recorder::begin(Call call) {
  std::lock_guard<std::mutex> lock(mutex_);
  call.id = next_++;
  call.started = steady_seconds();
  const uint64_t id = call.id;
  ring_.push_back(std::move(call));
  if (ring_.size() > capacity_) ring_.pop_front();
  return id;
}

Call* Recorder::find(uint64_t id) {
  if (ring_.empty() || id < ring_.front().id || id > ring_.back().id) return nullptr;
  return &ring_[id - ring_.front().id];
}

void Recorder::update(uint64_t id, Path path, const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Call* call = find(id)) {
    call->path = path;
    call->reason = reason;
    call->state = CallState::running;
  }
}

void Recorder::note_copies(uint64_t id, int64_t copies, const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  Call* call = find(id);
  if (!call) return;
  call->repair_copies += copies;
  call->repair_reason += (call->repair_reason.empty() ? "" : "; ") + why;
}

void Recorder::note_kernel_copies(uint64_t id, int64_t copies) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Call* call = find(id)) call->kernel_copies = copies;
}

void Recorder::end(uint64_t id, bool failed) {
  std::lock_guard<std::mutex> lock(mutex_);
  Call* call = find(id);
  if (!call) return;
  call->finished = steady_seconds();
  call->state = failed ? CallState::failed : CallState::done;
  if (failed) return;
  auto found = totals_.find(std::tie(call->op, call->path, call->reason));
  if (found == totals_.end()) found = totals_.emplace(Key{call->op, call->path, call->reason}, Totals{}).first;
  Totals& t = found->second;
  t.calls += 1;
  t.bytes += call->bytes;
  t.repair_copies += call->repair_copies;
  t.kernel_copies += call->kernel_copies;
  t.seconds += call->finished - call->started;
}

std::vector<Call> Recorder::recent() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {ring_.begin(), ring_.end()};
}

Recorder::TotalsByKey Recorder::totals() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return totals_;
}

void Recorder::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  totals_.clear();
}

}  // namespace tide
