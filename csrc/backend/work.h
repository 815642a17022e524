// The handle of one collective that tide carries. CPU: complete when the data is there.
#pragma once

#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tide {

class Work : public c10d::Work {
 public:
  // `outputs` live as long as the handle; `interrupted` is called every 100 ms of wait() and throws on Ctrl-C.
  Work(int rank, c10d::OpType op, std::vector<at::Tensor> outputs, uint64_t sequence,
       std::function<void()> interrupted);

  void finish_call(std::exception_ptr error);
  // Of a call whose outputs are in order on the current stream of their device. `async`: somebody gets the handle.
  void finish_in_order(bool async);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  // Callbacks run on a thread of their own, so that they may issue and await further calls.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  std::vector<at::Tensor> outputs_;
  uint64_t sequence_;
  std::function<void()> interrupted_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when first asked for
  bool over_ = false;
  std::exception_ptr error_;
};

// nccl gives no handle of a call that is not asynchronous: it is in order on the current stream.
inline void wait_for(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

// The handle of a call whose result is there (CUDA: ordered on the current stream).
c10::intrusive_ptr<c10d::Work> finished(int rank, c10d::OpType op, const at::Tensor& output, bool async);

// Several handles as one, for the coalesced calls.
class GroupWork : public c10d::Work {
 public:
  GroupWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works, std::vector<at::Tensor> outputs);
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::vector<at::Tensor> outputs_;
};

// Waits until no thread runs a callback of a future any more, before the interpreter goes. False: `longest` was not
// enough.
bool finish_callbacks(std::chrono::milliseconds longest);

}  // namespace tide
