#include "cuda_transport.h"

#include <cstring>
#include <sstream>

#include "../../kernels/accumulate_cuda.h"
#include "../executor.h"

namespace tide::cuda {

namespace {

DevicePtr device(const void* pointer) { return reinterpret_cast<DevicePtr>(pointer); }

Event record(Stream stream) {
  Event event = nullptr;
  check(driver().event_create(&event, kEventDisableTiming), "cuEventCreate");
  check(driver().event_record(event, stream), "cuEventRecord");
  return event;
}

// Tells every rank this rank's problem ("" for none) and returns the first one, with its rank.
std::string agree(Transport& control, uint64_t sequence, const std::string& problem, const Wait& wait) {
  const auto all = control.exchange(Channel::memory, sequence, problem, wait);
  control.complete(Channel::memory, sequence);
  for (size_t r = 0; r < all.size(); ++r) {
    if (!all[r].empty()) return "rank " + std::to_string(r) + ": " + all[r];
  }
  return "";
}

}  // namespace

CudaResult connect_cuda(const Speaker& who, Bootstrap& bootstrap, const CudaOptions& options) {
  ShmOptions shm = options.shm;
  shm.arena_bytes = 4096;  // only the tables are used
  ShmResult control = connect_shm(who, bootstrap, shm);
  if (!control.transport) return {nullptr, control.reason};
  const Wait wait{Clock::now() + shm.handshake_timeout * 3, nullptr, "connect"};
  uint64_t sequence = 0;

  std::string problem = driver().problem;
  if (problem.empty()) problem = nccl().problem;
  if (std::string why = agree(*control.transport, ++sequence, problem, wait); !why.empty()) return {nullptr, why};

  NcclUniqueId id{};
  problem = "";
  if (who.rank == 0 && nccl().unique_id(&id) != 0) problem = "ncclGetUniqueId failed";
  const auto ids = control.transport->exchange(Channel::memory, ++sequence, std::string(id.bytes, sizeof id.bytes), wait);
  control.transport->complete(Channel::memory, sequence);
  std::memcpy(id.bytes, ids[0].data(), sizeof id.bytes);
  if (std::string why = agree(*control.transport, ++sequence, problem, wait); !why.empty()) return {nullptr, why};

  NcclComm comm = nullptr;
  std::shared_ptr<CudaTransport> transport;
  try {
    check_nccl(nccl().init_rank(&comm, who.world, id, who.rank), "ncclCommInitRank");
    transport.reset(new CudaTransport(who, control, comm, options));
    transport->map_tables();
  } catch (const Error& error) {
    problem = error.what();
  }
  std::string why = agree(*control.transport, ++sequence, problem, wait);
  if (why.empty()) {
    transport->memory_calls_ = sequence;
    why = transport->grow(options.staging_bytes, wait);
  }
  if (!why.empty()) return {nullptr, why};
  transport->staging_ = transport->arena_->acquire(options.staging_bytes, &why);
  transport->staging_ranges_.grow(transport->staging_->bytes);
  return {transport, ""};
}

CudaTransport::CudaTransport(const Speaker& who, ShmResult control, NcclComm comm, const CudaOptions& options)
    : who_(who),
      control_(control.transport),
      tables_(control.tables),
      options_(options),
      comm_(comm),
      arena_(std::make_shared<DeviceArena>(who.rank, who.world)) {
  auto diagnose = [this](Channel channel, uint64_t sequence, bool late) -> std::string {
    return this->diagnose(channel, sequence, late);
  };
  watchdog_ = std::make_unique<Watchdog>(diagnose, [this](const std::string& text) { options_.on_timeout(text); });
}

CudaTransport::~CudaTransport() {
  close("the process group was destroyed");
  for (auto& [host, mapped] : mapped_) driver().host_unregister(host);
}

void CudaTransport::map_tables() {
  for (int rank = 0; rank < who_.world; ++rank) {
    auto [memory, bytes] = tables_->table_memory(rank);
    check(driver().host_register(memory, static_cast<size_t>(bytes), kHostRegisterPortable | kHostRegisterDeviceMap),
          "cuMemHostRegister");
    DevicePtr mapped = 0;
    check(driver().host_device_pointer(&mapped, memory, 0), "cuMemHostGetDevicePointer");
    mapped_.emplace_back(memory, mapped);
  }
}

DevicePtr CudaTransport::device_word(int owner, Channel channel, Flag flag, int source) {
  const auto& [host, mapped] = mapped_[static_cast<size_t>(owner)];
  auto* word = reinterpret_cast<std::byte*>(&tables_->flag_word(owner, channel, flag, source));
  return mapped + static_cast<DevicePtr>(word - host);
}

// Collective. "" or why no rank has grown.
std::string CudaTransport::grow(int64_t bytes, const Wait& wait) {
  const std::string problem = arena_->allocate(bytes);
  const std::string why = agree(*control_, ++memory_calls_, problem, wait);
  if (!why.empty()) {
    arena_->drop_pending();
    return why;
  }
  arena_->register_pending(comm_);
  return "";
}

std::optional<Window> CudaTransport::slot(int64_t bytes, Stream stream, const Wait& wait, std::string* why) {
  auto window = arena_->acquire(bytes, why);
  // Reshard is rank-local, so free lists may differ: one rank's need makes all grow, in the same call on all.
  const auto needs = control_->exchange(Channel::memory, ++memory_calls_,
                                        std::to_string(bytes) + (window ? " fits" : " grow"), wait);
  control_->complete(Channel::memory, memory_calls_);
  bool grow_now = false;
  for (size_t r = 0; r < needs.size(); ++r) {
    if (std::stoll(needs[r]) != bytes) {
      if (window) arena_->release(*window);
      fail(ErrorKind::usage, who_, "memory #" + std::to_string(memory_calls_),
           "ranks asked for slots of different sizes; got " + std::to_string(bytes) + " bytes here and " + needs[r] +
               " on rank " + std::to_string(r) + ", expected the same; shard the same parameters on every rank");
    }
    grow_now = grow_now || needs[r].find("grow") != std::string::npos;
  }
  if (grow_now) {
    const std::string problem = grow(bytes, wait);
    if (!window) {
      if (!problem.empty()) {
        *why = problem;
        return std::nullopt;
      }
      window = arena_->acquire(bytes, why);
    }
  }
  if (window) arena_->wait_until_free(*window, stream);
  return window;
}

std::vector<std::string> CudaTransport::exchange(Channel channel, uint64_t sequence, const std::string& mine,
                                                 const Wait& wait) {
  deadlines_[static_cast<size_t>(channel)] = wait.deadline;
  return control_->exchange(channel, sequence, mine, wait);
}

void CudaTransport::complete(Channel channel, uint64_t sequence) {
  flush(channel);
  watchdog_->watch(channel, sequence, record(stream(channel)), deadlines_[static_cast<size_t>(channel)]);
  control_->complete(channel, sequence);
}

std::byte* CudaTransport::address(int rank, int64_t offset, int64_t bytes) {
  std::byte* address = arena_->peer_address(rank, offset, bytes);
  if (!address) {
    fail(ErrorKind::usage, who_, "",
         "bytes [" + std::to_string(offset) + ", +" + std::to_string(bytes) + ") are not in the device arena of rank " +
             std::to_string(rank));
  }
  return address;
}

// Staging has a segment of its own, used in stream order by one channel at a time and range; it never competes with
// parameters for room.
std::optional<Window> CudaTransport::acquire(Channel channel, int64_t bytes, std::string* why) {
  std::optional<int64_t> at;
  {
    std::lock_guard<std::mutex> lock(staging_mutex_);
    at = staging_ranges_.take((bytes + 4095) / 4096 * 4096);
  }
  if (!at) {
    *why = "the staging segment of " + std::to_string(staging_->bytes) + " bytes is full";
    return std::nullopt;
  }
  const Window window{staging_->offset + *at, bytes};
  arena_->wait_until_free(window, stream(channel));
  return window;
}

void CudaTransport::note_use(Channel channel, const Window& window) {
  arena_->note_use(window, record(stream(channel)));
}

void CudaTransport::release(Channel channel, const Window& window) {
  flush(channel);
  note_use(channel, window);
  std::lock_guard<std::mutex> lock(staging_mutex_);
  staging_ranges_.give_back(window.offset - staging_->offset);
}

void CudaTransport::copy(Channel channel, std::byte* to, const std::byte* from, int64_t bytes) {
  Batch& batch = batches_[static_cast<size_t>(channel)];
  batch.to.push_back(device(to));
  batch.from.push_back(device(from));
  batch.bytes.push_back(static_cast<size_t>(bytes));
}

void CudaTransport::flush(Channel channel) {
  Batch& batch = batches_[static_cast<size_t>(channel)];
  const size_t count = batch.bytes.size();
  if (count == 0) return;
  if (count > 1 && driver().copy_batch) {
    CopyAttributes attributes;
    size_t first = 0;
    check(driver().copy_batch(batch.to.data(), batch.from.data(), batch.bytes.data(), count, &attributes, &first, 1,
                              stream(channel)),
          "cuMemcpyBatchAsync");
  } else {
    for (size_t i = 0; i < count; ++i) {
      check(driver().copy(batch.to[i], batch.from[i], batch.bytes[i], stream(channel)), "cuMemcpyAsync");
    }
  }
  batch.to.clear();
  batch.from.clear();
  batch.bytes.clear();
}

void CudaTransport::fill(Channel channel, std::byte* to, int64_t bytes) {
  flush(channel);
  check(driver().fill(device(to), 0, static_cast<size_t>(bytes), stream(channel)), "cuMemsetD8Async");
}

void CudaTransport::accumulate(Channel channel, ElementType in, ElementType out, const AccumulateArgs& args) {
  flush(channel);
  accumulate_launch()(in, out, args, options_.accumulate_ctas, stream(channel));
}

void CudaTransport::signal(Channel channel, int peer, Flag flag, uint64_t value) {
  flush(channel);
  check(driver().stream_write_value(stream(channel), device_word(peer, channel, flag, who_.rank), value, kWriteDefault),
        "cuStreamWriteValue64");
}

void CudaTransport::wait(Channel channel, int peer, Flag flag, uint64_t value, const Wait&) {
  flush(channel);
  check(driver().stream_wait_value(stream(channel), device_word(who_.rank, channel, flag, peer), value,
                                   kWaitGreaterOrEqual),
        "cuStreamWaitValue64");
  std::lock_guard<std::mutex> lock(awaited_mutex_);
  awaited_[{channel, flag, peer}] = value;
}

// Called by the watchdog's thread.
std::string CudaTransport::diagnose(Channel channel, uint64_t sequence, bool late) {
  std::ostringstream missing, gone;
  {
    std::lock_guard<std::mutex> lock(awaited_mutex_);
    for (const auto& [key, value] : awaited_) {
      const auto [of, flag, peer] = key;
      if (of != channel) continue;
      const uint64_t now = tables_->flag_word(who_.rank, of, flag, peer).load();
      if (now >= value) continue;
      missing << (missing.str().empty() ? "" : "; ") << tables_->last_calls(peer) << " owes its " << to_string(flag)
              << " flag";
      if (const std::string lost = tables_->lost(peer); !lost.empty()) gone << (gone.str().empty() ? "" : "; ") << lost;
    }
  }
  const std::string call = std::string(to_string(channel)) + " #" + std::to_string(sequence);
  if (!gone.str().empty()) return who_.prefix(call) + gone.str() + " while the device waits: " + missing.str();
  if (!late) return "";
  if (missing.str().empty()) missing << "every flag has arrived; this rank's own stream is behind";
  return who_.prefix(call) + "not over at its deadline: " + missing.str() +
         "; look at that rank, or set a longer timeout";
}

void CudaTransport::abort(const std::string& reason) {
  if (aborted_.exchange(true)) return;
  control_->abort(reason);
  arena_->quarantine();
  // Every wait on this rank's words ends, so that the device can be used again; results are garbage and every later
  // call and Work.wait raises.
  std::lock_guard<std::mutex> lock(awaited_mutex_);
  for (const auto& [key, value] : awaited_) {
    const auto [channel, flag, peer] = key;
    tables_->flag_word(who_.rank, channel, flag, peer).store(UINT64_MAX);
  }
}

void CudaTransport::close(const std::string& reason) {
  if (closed_.exchange(true)) return;
  if (!aborted_) {
    for (Stream s : options_.streams) {
      if (s) driver().stream_synchronize(s);
    }
  }
  watchdog_->stop();
  if (!aborted_) arena_->deregister(comm_);
  if (comm_) nccl().abort(comm_);
  comm_ = nullptr;
  control_->close(reason);
}

}  // namespace tide::cuda
