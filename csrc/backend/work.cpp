#include "work.h"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace tide {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

namespace {
constexpr auto kTick = std::chrono::milliseconds(100);

// Threads that run callbacks of futures. Never freed: they may outlive everything else.
class Callbacks {
 public:
  static Callbacks& get() {
    static auto* const callbacks = new Callbacks;
    return *callbacks;
  }
  void begun() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++running_;
  }
  void done() {
    std::lock_guard<std::mutex> lock(mutex_);
    --running_;
    none_.notify_all();
  }
  bool wait(std::chrono::milliseconds longest) {
    std::unique_lock<std::mutex> lock(mutex_);
    return none_.wait_for(lock, longest, [this] { return running_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable none_;
  int running_ = 0;
};

// Of tensors like these. A future that holds CUDA tensors has to know their device.
FuturePtr future_of(const std::vector<at::Tensor>& outputs) {
  std::vector<c10::Device> devices;
  if (!outputs.empty() && outputs[0].is_cuda()) devices.push_back(outputs[0].device());
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
}

void settle(c10::ivalue::Future& future, const std::vector<at::Tensor>& outputs, const std::exception_ptr& error) {
  if (error) {
    future.setError(error);
  } else {
    future.markCompleted(c10::IValue(outputs));
  }
}
}  // namespace

Work::Work(int rank, c10d::OpType op, std::vector<at::Tensor> outputs, uint64_t sequence,
           std::function<void()> interrupted)
    : c10d::Work(rank, op), outputs_(std::move(outputs)), sequence_(sequence), interrupted_(std::move(interrupted)) {}

void Work::finish_call(std::exception_ptr error) {
  FuturePtr future;
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    over_ = true;
    error_ = error;
    future = future_;
  }
  finish(error);
  if (!future) return;
  // The lane's thread runs this; a callback that awaits a later call of the lane would keep it from ever starting.
  auto complete = [future, error, outputs = outputs_]() mutable {
    settle(*future, outputs, error);
    future.reset();
    outputs.clear();
    Callbacks::get().done();
  };
  Callbacks::get().begun();
  try {
    std::thread(complete).detach();
  } catch (const std::system_error&) {
    complete();
  }
}

void Work::finish_in_order(bool async) {
  finish_call(nullptr);
  if (!async) return;
  std::lock_guard<std::mutex> lock(future_mutex_);
  future_ = future_of(outputs_);
  future_->markCompleted(c10::IValue(outputs_));
}

bool finish_callbacks(std::chrono::milliseconds longest) { return Callbacks::get().wait(longest); }

FuturePtr Work::getFuture() {
  std::lock_guard<std::mutex> lock(future_mutex_);
  if (!future_) {
    future_ = future_of(over_ ? outputs_ : std::vector<at::Tensor>());
    if (over_) settle(*future_, outputs_, error_);
  }
  return future_;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!completed_) {
    auto slice = kTick;
    if (timeout != kNoTimeout) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      TORCH_CHECK(left.count() > 0, "tide: Work.wait: the call is not over after ", timeout.count(),
                  " ms; it goes on; wait longer or look at tide_backend.report()");
      slice = std::min(slice, left);
    }
    if (cv_.wait_for(lock, slice) == std::cv_status::timeout && !completed_ && interrupted_) {
      lock.unlock();
      interrupted_();
      lock.lock();
    }
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

c10::intrusive_ptr<c10d::Work> finished(int rank, c10d::OpType op, const at::Tensor& output, bool async) {
  auto work = c10::make_intrusive<Work>(rank, op, std::vector<at::Tensor>{output}, 0, nullptr);
  work->finish_in_order(async);
  return work;
}

GroupWork::GroupWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works, std::vector<at::Tensor> outputs)
    : c10d::Work(rank, c10d::OpType::COALESCED), works_(std::move(works)), outputs_(std::move(outputs)) {
  works_.erase(std::remove(works_.begin(), works_.end(), nullptr), works_.end());  // nccl's that were not asynchronous
}

bool GroupWork::isCompleted() {
  for (const auto& work : works_) {
    if (!work->isCompleted()) return false;
  }
  return true;
}

bool GroupWork::isSuccess() const {
  for (const auto& work : works_) {
    if (!work->isSuccess()) return false;
  }
  return true;
}

std::exception_ptr GroupWork::exception() const {
  for (const auto& work : works_) {
    if (auto error = work->exception()) return error;
  }
  return nullptr;
}

bool GroupWork::wait(std::chrono::milliseconds timeout) {
  bool all = true;
  for (const auto& work : works_) all = work->wait(timeout) && all;
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> GroupWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& work : works_) futures.push_back(work->getFuture());
  auto joined = future_of(outputs_);
  c10::collectAll(futures)->addCallback([joined, outputs = outputs_](c10::ivalue::Future& all) {
    if (all.hasError()) {
      joined->setError(all.exception_ptr());
    } else {
      joined->markCompleted(c10::IValue(outputs));
    }
  });
  return joined;
}

}  // namespace tide
