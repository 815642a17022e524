// The CUDA half of the backend: joins the caller's streams to the channels' streams and back.
//
// A call is over for the host when it is enqueued. The channel's stream waits for the caller's current stream, the
// caller's stream (or Work.wait) waits for the channel's. What an asynchronous call touches is recorded on its stream,
// so that the caching allocator does not hand it out again before that.
#pragma once

#include <c10/core/Event.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "cuda/cuda_transport.h"
#include "engine.h"
#include "options.h"

namespace tide {

class CudaSide {
 public:
  CudaSide(Speaker who, std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options, at::Device device);
  ~CudaSide();

  Engine& engine() { return *engine_; }
  std::shared_ptr<Engine> shared_engine() { return engine_; }
  at::Device device() const { return device_; }
  c10::Stream current_stream() const;
  void* current_handle() const;
  // Whether a CUDA graph is captured on the caller's stream.
  bool capturing();
  c10::Stream stream(Channel channel) const;
  // Whether tide carries CUDA calls of this group. Raises while a CUDA graph is captured.
  bool connect();

  // Runs `body` (which enqueues on the channel's stream) between the two joins. `waits`: the caller's stream will wait
  // for the result at once, so that nothing allocated on it is given out before (memory of another stream is the
  // caller's to keep, as with nccl); recording would hold memory much longer.
  template <typename Body>
  c10::Event enqueue(Channel channel, const std::vector<at::Tensor>& touched, bool waits, Body body) {
    before(channel);
    try {
      body();
    } catch (...) {
      record(channel, touched);  // part of it may be on the stream
      throw;
    }
    if (!waits) record(channel, touched);
    return after(channel);
  }

  // Collective at every call.
  std::optional<at::Tensor> slot(int64_t bytes, void* current_stream, cuda::ParameterGroup group,
                                 std::chrono::milliseconds timeout, const std::function<void()>& interrupted,
                                 std::string* reason);
  void shutdown() { engine_->shutdown(); }
  // The caller gives the group up: waits on the device end, and what they guarded is garbage.
  void abort(const std::string& reason);

 private:
  void make_streams();
  void enter();
  void refuse_capture(cuda::Stream stream, const std::string& call);
  void before(Channel channel);
  void record(Channel channel, const std::vector<at::Tensor>& touched);
  c10::Event after(Channel channel);

  at::Device device_;
  void* context_ = nullptr;
  std::array<cuda::Stream, kChannels> streams_{};
  std::shared_ptr<Engine> engine_;
};

// Complete for the host when the call is on its stream; wait() orders the current stream behind it.
class CudaWork : public c10d::Work {
 public:
  CudaWork(int rank, c10d::OpType op, c10::Event done, std::vector<at::Tensor> outputs, std::shared_ptr<Engine> engine,
           at::Device device);
  bool isCompleted() override;
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  c10::Event done_;
  std::vector<at::Tensor> outputs_;
  std::shared_ptr<Engine> engine_;
  at::Device device_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when first asked for
};

}  // namespace tide
