// One group's collectives without tensors: connects, agrees, selects, plans, executes, records.
//
// Calls of one channel run in issue order (Lane); different channels run beside each other. After a call broke in
// the middle the group is poisoned: flags and windows of that call are in an unknown state, so every later call
// raises the first error again instead of running on them.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "agreement.h"
#include "bootstrap.h"
#include "error.h"
#include "executor.h"
#include "lane.h"
#include "plan.h"
#include "recorder.h"
#include "transport.h"

namespace tide {

struct Connection {
  std::shared_ptr<Transport> transport;  // null: this group cannot share memory, and `reason` says why
  std::string reason;
};

struct EngineOptions {
  // Collective over the group, called once: every rank gets a transport or none does.
  std::function<Connection(const Speaker&, Bootstrap&)> connect;
  Device device = Device::cpu;
  bool can_accumulate = true;  // the device has a reduction kernel in this build
  Staging staging;
  int64_t plain_bytes = 0;  // CUDA: see Capabilities
  size_t recorded_calls = 1000;
};

// One call as the backend hands it over.
struct CollectiveCall {
  Request request;
  Buffers buffers;
  std::string problem;  // found by the backend's own checks; peers are told, then the call raises
  uint64_t record_id = 0;
  int64_t output_bytes = 0;
};

class Engine {
 public:
  Engine(Speaker who, std::shared_ptr<Bootstrap> bootstrap, EngineOptions options);
  ~Engine();

  Lane& lane(Channel channel) { return lanes_[static_cast<size_t>(channel)]; }
  Recorder& recorder() { return recorder_; }
  const Speaker& speaker() const { return who_; }

  // Runs one call to its end on this thread. Must be called in ticket order (through the lane). Path::inner means
  // that nothing was moved and the inner backend has to do the call.
  Selection run(const CollectiveCall& call, const Wait& wait);
  // Runs `body`, a step of this group that talks to its peers: an error other than usage poisons the group.
  void guarded(const std::string& call, const std::function<void()>& body);

  // Makes the group's shared memory if that has not happened yet; collective at the first call.
  void connect();
  // Which way a call would go by what the group knows so far; the answer is final when it is Path::inner. Before the
  // group is connected: as if it had memory.
  Selection preselect(const Request& request, const std::string& inner_only_reason = "") const;
  // The ranks, together, ask for memory of the arena that plain CUDA calls may write.
  void expect_plain_slots();

  std::shared_ptr<Transport> transport() const;
  // Connects, and gives the arena, or null and why there is none.
  std::shared_ptr<Arena> arena(std::string* why);
  bool connected() const;
  // (shared memory in use, why not)
  std::pair<bool, std::string> shared_memory() const;
  // The arena when connected, without connecting.
  std::shared_ptr<Arena> arena_if_connected() const;

  // Throws when an earlier call broke the group.
  void raise_if_poisoned(const std::string& call) const;

  // Ends running and later calls with `reason`; peers are told.
  void abort(const std::string& reason);
  void shutdown();

 private:
  class Meeting;  // one call's agreement with the peers: meeting.h

  Capabilities capabilities() const;  // with mutex_ held
  Selection carry_out(const CollectiveCall& call, const Wait& wait);
  std::string provide(Transport& transport, Channel channel, const Wait& wait);
  void move(const Request& request, Path path, const Execution& execution, Transport* transport, const Wait& wait);
  std::shared_ptr<const Plan> plan(const Request& request, Path path);
  void poison(const std::string& reason);
  std::string poisoned() const;

  Speaker who_;
  std::shared_ptr<Bootstrap> bootstrap_;
  EngineOptions options_;
  std::array<Lane, kChannels> lanes_;
  // Exchanges so far, by channel; ahead of the ticket after a call that needed two. Guarded by the lane's order.
  std::array<uint64_t, kChannels> exchanges_{};
  Recorder recorder_;

  std::mutex connect_mutex_;  // held across the handshake
  mutable std::mutex mutex_;  // guards what follows; never held across a wait
  bool connected_ = false;
  bool plain_slots_ = false;
  std::shared_ptr<Transport> transport_;
  std::string no_transport_;
  std::string poisoned_;
  std::map<std::string, std::shared_ptr<const Plan>> plans_;
};

}  // namespace tide
