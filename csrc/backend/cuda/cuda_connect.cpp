// How a CUDA group connects: the ranks agree on each step before any of them takes one that waits for the others.
#include <cstring>

#include "../../kernels/load_cuda.h"
#include "agree.h"
#include "cuda_transport.h"
#include "multicast.h"

namespace tide::cuda {

namespace {

constexpr int kPushPriority = -1;  // high, as the channels' own streams

}  // namespace

CudaResult connect_cuda(const Speaker& who, Bootstrap& bootstrap, const CudaOptions& options) {
  ShmOptions shm = options.shm;
  shm.arena_bytes = 4096;  // only the tables are used
  ShmResult control = connect_shm(who, bootstrap, shm);
  if (!control.transport) return {nullptr, control.reason};
  // Ranks start NCCL at their own pace; only what each has to say before that comes soon.
  const auto soon = [&] { return Wait{Clock::now() + shm.handshake_timeout * 3, nullptr, "connect"}; };
  const auto in_time = [&] { return Wait{Clock::now() + options.timeout, nullptr, "connect"}; };
  uint64_t sequence = 0;

  std::string problem = driver().problem;
  if (problem.empty()) problem = nccl().problem;
  if (std::string why = agree(*control.transport, ++sequence, problem, soon()); !why.empty()) return {nullptr, why};

  NcclUniqueId id{};
  problem = "";
  if (who.rank == 0 && nccl().unique_id(&id) != 0) problem = "ncclGetUniqueId failed";
  // What this rank does about staging must be what all do, and multicast is for all or for none.
  const size_t reuse = sizeof id.bytes, wish = reuse + 1;  // where they begin
  const std::string mine = std::string(id.bytes, sizeof id.bytes) + (options.slot_reuse ? '1' : '0') +
                           multicast_wish(who.world, options.multicast);
  const auto ids = control.transport->exchange(Channel::memory, ++sequence, mine, soon());
  control.transport->complete(Channel::memory, sequence);
  std::memcpy(id.bytes, ids[0].data(), sizeof id.bytes);
  for (size_t r = 1; r < ids.size(); ++r) {
    if (ids[r][reuse] == ids[0][reuse]) continue;
    problem = std::string("got TIDE_SLOT_REUSE=") + ids[0][reuse] + " on rank 0 and " + ids[r][reuse] + " on rank " +
              std::to_string(r) + ", expected the same on every rank; set it alike everywhere";
  }
  std::vector<std::string> wishes;
  for (const std::string& one : ids) wishes.push_back(one.substr(wish));
  if (std::string why = agree(*control.transport, ++sequence, problem, soon()); !why.empty()) return {nullptr, why};

  // What one rank can find out alone comes before NCCL's start, which would wait for a rank that has failed.
  std::shared_ptr<CudaTransport> transport;
  try {
    transport.reset(new CudaTransport(who, control, options));
    transport->multicast_ = agreed_multicast(wishes);
    transport->map_tables();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (std::string why = agree(*control.transport, ++sequence, problem, soon()); !why.empty()) return {nullptr, why};
  try {
    transport->open(id);
  } catch (const Error& error) {
    problem = error.what();
  }
  std::string why = agree(*control.transport, ++sequence, problem, in_time());
  if (!why.empty()) return {nullptr, why};
  transport->memory_calls_ = sequence;
  if (!transport->multicast_.why_not.empty()) transport->say_no_multicast(transport->multicast_.why_not);
  if (!options.slot_reuse) why = transport->provide(Channel::reduce_scatter, in_time());
  if (!why.empty()) return {nullptr, why};
  return {transport, ""};
}

void CudaTransport::map_tables() {
  for (int rank = 0; rank < who_.world; ++rank) {
    auto [memory, bytes] = tables_->table_memory(rank);
    check(driver().host_register(memory, static_cast<size_t>(bytes), kHostRegisterPortable | kHostRegisterDeviceMap),
          "cuMemHostRegister");
    mapped_.emplace_back(memory, 0);  // from here on the destructor undoes it
    check(driver().host_device_pointer(&mapped_.back().second, memory, 0), "cuMemHostGetDevicePointer");
  }
  for (Channel channel : {Channel::reduce_scatter, Channel::all_to_all}) {
    check(driver().stream_create(&pushes_[static_cast<size_t>(channel)], kStreamNonBlocking, kPushPriority),
          "cuStreamCreateWithPriority");
  }
  load_kernels();
  // Devices without these operations say so here, before any plan is on a stream.
  const Stream stream = this->stream(Channel::memory);
  const DevicePtr word = device_word(who_.rank, Channel::memory, Flag::ready, who_.rank);
  check(driver().stream_write_value(stream, word, 1, kWriteDefault), "cuStreamWriteValue64");
  check(driver().stream_wait_value(stream, word, 1, kWaitGreaterOrEqual), "cuStreamWaitValue64");
  give({{stream, word, 2, /*wait=*/false}, {stream, word, 2, /*wait=*/true}}, 0, 2);
}

void CudaTransport::open(const NcclUniqueId& id) {
  const Watchdog::HostCall guarded(*watchdog_, 0, Clock::now() + options_.timeout);
  check_nccl(nccl().init_rank(&comm_, who_.world, id, who_.rank), "ncclCommInitRank");
}

}  // namespace tide::cuda
