#include "cuda_transport.h"

#include <algorithm>
#include <sstream>

#include "../../kernels/accumulate_cuda.h"
#include "../../kernels/small_copies_cuda.h"

namespace tide::cuda {

namespace {

// Stream waits compare as signed 64-bit numbers, cyclically: UINT64_MAX would be -1, below everything.
constexpr uint64_t kReleased = INT64_MAX;
// A copy engine spends about 1 us on each copy, and the host as much; a kernel takes many at once, but has to wait for
// room beside the compute.
constexpr size_t kSmallCopy = 64 << 10;
constexpr int kManySmallCopies = 16;
constexpr size_t kSmallBatch = 1 << 20;  // bytes; some 3 us over NVLink

DevicePtr device(const void* pointer) { return reinterpret_cast<DevicePtr>(pointer); }

Copy2D copy_2d(const Placement& p) {
  Copy2D result;
  result.from.device = device(p.from);
  result.from.pitch = static_cast<size_t>(p.from_pitch);
  result.to.device = device(p.to);
  result.to.pitch = static_cast<size_t>(p.to_pitch);
  result.width_bytes = static_cast<size_t>(p.bytes);
  result.height = static_cast<size_t>(p.rows);
  return result;
}

Event record(Stream stream) {
  Event event = nullptr;
  check(driver().event_create(&event, kEventDisableTiming), "cuEventCreate");
  const Result result = driver().event_record(event, stream);
  if (result != 0) driver().event_destroy(event);
  check(result, "cuEventRecord");
  return event;
}

// Transports of groups that broke: peers may still write their segments, and their watchdogs still look.
void keep_for_ever(std::shared_ptr<CudaTransport> transport) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<CudaTransport>>;
  std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(transport));
}

}  // namespace

CudaTransport::CudaTransport(const Speaker& who, ShmResult control, const CudaOptions& options)
    : who_(who),
      control_(control.transport),
      tables_(control.tables),
      options_(options),
      arena_(std::make_shared<DeviceArena>(who.rank, who.world)) {
  Watchdog::Callbacks callbacks;
  callbacks.diagnose = [this](Channel channel, uint64_t sequence, Doubt doubt, const std::string& failure) {
    return diagnose(channel, sequence, doubt, failure);
  };
  callbacks.report = [this](const std::string& text) {
    options_.on_timeout(text);
    give_up(text);
  };
  // Only now: the journal that peers print says "in progress" as long as the device is at it.
  callbacks.finished = [this](Channel channel, uint64_t sequence) { control_->complete(channel, sequence); };
  callbacks.release = [this] { return release_waits(); };
  watchdog_ = std::make_unique<Watchdog>(std::move(callbacks));
}

CudaTransport::~CudaTransport() {
  if (guard_.in_child()) {
    static_cast<void>(watchdog_.release());  // its thread is the parent's
    return;
  }
  close("the process group was destroyed");
  watchdog_.reset();
  for (auto& [host, mapped] : mapped_) driver().host_unregister(host);
  for (Stream stream : pushes_) {
    if (stream) driver().stream_destroy(stream);
  }
}

DevicePtr CudaTransport::device_word(int owner, Channel channel, Flag flag, int source) {
  const auto& [host, mapped] = mapped_[static_cast<size_t>(owner)];
  auto* word = reinterpret_cast<std::byte*>(&tables_->flag_word(owner, channel, flag, source));
  return mapped + static_cast<DevicePtr>(word - host);
}

std::vector<std::string> CudaTransport::exchange(Channel channel, uint64_t sequence, const std::string& mine,
                                                 const Wait& wait) {
  {
    std::lock_guard<std::mutex> lock(awaited_mutex_);
    calls_[static_cast<size_t>(channel)] = {sequence, wait.deadline, false};
  }
  kernel_copies_[static_cast<size_t>(channel)] = 0;
  batches_[static_cast<size_t>(channel)].call = wait.call;
  follow(stream(channel), pushing(channel));  // what the caller computed is there, and the call before is over
  return control_->exchange(channel, sequence, mine, wait);
}

void CudaTransport::complete(Channel channel, uint64_t sequence) {
  flush(channel);
  CallNow call = call_now(channel);
  call.sequence = sequence;
  watch(channel, call);
}

// The pushes of a call belong to it: the caller's memory is read by them.
void CudaTransport::watch(Channel channel, const CallNow& call) {
  follow(pushing(channel), stream(channel));
  watchdog_->watch(channel, call.sequence, record(stream(channel)), call.deadline);
}

void CudaTransport::note_use(Channel channel, const Window& window) {
  arena_->note_use(window, record(stream(channel)), stream(channel));
}

// Everything that `later` is given from now on runs behind what `earlier` has been given.
void CudaTransport::follow(Stream earlier, Stream later) {
  if (earlier == later) return;
  const Event event = record(earlier);
  const Result result = driver().stream_wait_event(later, event, 0);
  driver().event_destroy(event);
  check(result, "cuStreamWaitEvent");
}

std::vector<Stream> CudaTransport::all_streams() const {
  std::vector<Stream> streams(options_.streams.begin(), options_.streams.end());
  streams.insert(streams.end(), pushes_.begin(), pushes_.end());
  return streams;
}

void CudaTransport::copy(Channel channel, std::byte* to, const std::byte* from, int64_t bytes) {
  Batch& batch = batches_[static_cast<size_t>(channel)];
  if (!batch.additions.empty() || !batch.only_data) flush(channel);
  batch.to.push_back(device(to));
  batch.from.push_back(device(from));
  batch.bytes.push_back(static_cast<size_t>(bytes));
  batch.all_bytes += static_cast<size_t>(bytes);
}

void CudaTransport::place(Channel channel, std::byte* to, const std::byte* from, int64_t bytes) {
  Batch& batch = batches_[static_cast<size_t>(channel)];
  if (!batch.additions.empty() || !batch.words.empty()) flush(channel);
  batch.placements.push_back({to, from, bytes});
}

void CudaTransport::copy_rows(Channel channel, std::byte* to, const std::byte* from, const Rows& rows) {
  Batch& batch = batches_[static_cast<size_t>(channel)];
  if (!batch.additions.empty() || !batch.only_data) flush(channel);
  batch.strided.push_back(copy_2d({to, from, rows.bytes, rows.rows, rows.to_pitch, rows.from_pitch}));
  batch.all_bytes += static_cast<size_t>(rows.bytes * rows.rows);
}

void CudaTransport::place_rows(Channel channel, std::byte* to, const std::byte* from, const Rows& rows) {
  Batch& batch = batches_[static_cast<size_t>(channel)];
  if (!batch.additions.empty() || !batch.words.empty()) flush(channel);
  batch.placements.push_back({to, from, rows.bytes, rows.rows, rows.to_pitch, rows.from_pitch});
}

// What was given is gone from the batch also when it fails: it is not given again.
void CudaTransport::flush(Channel channel) {
  if (batches_[static_cast<size_t>(channel)].empty()) return;
  Batch batch;
  std::swap(batch, batches_[static_cast<size_t>(channel)]);
  copy_batch(channel, batch);
  place_batch(stream(channel), batch);
  if (!batch.additions.empty()) {
    accumulate_launch()(batch.in, batch.out, batch.additions, options_.accumulate_ctas, stream(channel));
  }
  give_words(batch);
  batch.clear();
  std::swap(batch, batches_[static_cast<size_t>(channel)]);  // keeps its memory
}

// On the channel's own stream, where what they read was awaited. A copy engine is several times slower than a kernel at
// a copy within its device.
void CudaTransport::place_batch(Stream stream, Batch& batch) {
  if (batch.placements.empty()) return;
  if (const PlaceLaunch launch = place_launch()) return launch(batch.placements, options_.accumulate_ctas, stream);
  for (const Placement& p : batch.placements) {
    if (p.rows > 1) {
      const Copy2D rows = copy_2d(p);
      check(driver().copy_2d(&rows, stream), "cuMemcpy2DAsync");
    } else {
      check(driver().copy(device(p.to), device(p.from), static_cast<size_t>(p.bytes), stream), "cuMemcpyAsync");
    }
  }
}

void CudaTransport::copy_batch(Channel channel, Batch& batch) {
  std::vector<Placement> small;
  const auto is_small = [](size_t bytes) { return bytes <= kSmallCopy; };
  const auto launch = multicast_.usable ? nullptr : small_copies_launch();  // a kernel's plain stores are no multicast
  if (launch && std::count_if(batch.bytes.begin(), batch.bytes.end(), is_small) >= kManySmallCopies) {
    size_t kept = 0;
    for (size_t i = 0; i < batch.bytes.size(); ++i) {
      if (is_small(batch.bytes[i])) {
        small.push_back({reinterpret_cast<void*>(batch.to[i]), reinterpret_cast<const void*>(batch.from[i]),
                         static_cast<int64_t>(batch.bytes[i])});
      } else {
        batch.to[kept] = batch.to[i];
        batch.from[kept] = batch.from[i];
        batch.bytes[kept++] = batch.bytes[i];
      }
    }
    batch.bytes.resize(kept);
  }
  copy_by_engines(pushing(channel), batch);
  if (small.empty()) return;
  launch(small, options_.accumulate_ctas, pushing(channel));
  kernel_copies_[static_cast<size_t>(channel)] += static_cast<int64_t>(small.size());
}

void CudaTransport::copy_by_engines(Stream stream, Batch& batch) {
  for (const Copy2D& rows : batch.strided) check(driver().copy_2d(&rows, stream), "cuMemcpy2DAsync");
  const size_t count = batch.bytes.size();
  if (count == 0) return;
  Result result = 0;
  const char* call = "cuMemcpyAsync";
  if (count > 1 && driver().copy_batch) {
    CopyAttributes attributes;
    size_t first = 0;
    call = "cuMemcpyBatchAsync";
    result = driver().copy_batch(batch.to.data(), batch.from.data(), batch.bytes.data(), count, &attributes, &first, 1,
                                 stream);
  } else {
    for (size_t i = 0; i < count && result == 0; ++i) {
      result = driver().copy(batch.to[i], batch.from[i], batch.bytes[i], stream);
    }
  }
  check(result, call);
}

void CudaTransport::fill(Channel channel, std::byte* to, int64_t bytes) {
  flush(channel);
  check(driver().fill(device(to), 0, static_cast<size_t>(bytes), stream(channel)), "cuMemsetD8Async");
}

void CudaTransport::accumulate(Channel channel, ElementType in, ElementType out, const AccumulateArgs& args) {
  Batch& batch = batches_[static_cast<size_t>(channel)];
  // Most calls have one pair of types; what comes before must be given first, and so must additions of another pair.
  const bool other = !batch.additions.empty() && (batch.in != in || batch.out != out);
  if (!batch.copies_nothing() || !batch.words.empty() || other) flush(channel);
  batch.in = in;
  batch.out = out;
  batch.additions.push_back(args);
}

void CudaTransport::signal(Channel channel, int peer, Flag flag, uint64_t value) {
  Batch& batch = batches_[static_cast<size_t>(channel)];
  // The data flag follows the data; the others say what this rank's own stream has come to.
  const bool data = flag == Flag::data;
  batch.words.push_back({data ? pushing(channel) : stream(channel), device_word(peer, channel, flag, who_.rank), value,
                         /*wait=*/false});
  batch.only_data = batch.only_data && data;
  // Small copies to one peer do not go out before those to the next are known.
  if (data && batch.all_bytes > kSmallBatch) flush(channel);
}

void CudaTransport::wait(Channel channel, int peer, Flag flag, uint64_t value, const Wait&) {
  begin(channel);
  {
    std::lock_guard<std::mutex> lock(awaited_mutex_);
    awaited_[{channel, flag, peer}] = value;
  }
  Batch& batch = batches_[static_cast<size_t>(channel)];
  batch.words.push_back({flag == Flag::data ? stream(channel) : pushing(channel),
                         device_word(who_.rank, channel, flag, peer), value, /*wait=*/true});
  batch.only_data = false;
  if (aborted_) flush(channel);  // which says so
}

// In the order in which they were asked for: a stream of this rank may be where a peer waits for another.
void CudaTransport::give_words(const Batch& batch) {
  for (size_t first = 0, end = 0; first < batch.words.size(); first = end) {
    end = end_of_run(batch.words, first);
    enter(batch.call);
    try {
      // Without a lock: the driver may block here while its queue is full, and the watchdog must go on looking.
      give(batch.words, first, end);
    } catch (...) {
      leave();
      throw;
    }
    leave();
  }
}

// Announces a call of the driver that may block. Throws if the group has been aborted.
void CudaTransport::enter(const std::string& call) {
  std::lock_guard<std::mutex> lock(awaited_mutex_);
  if (aborted_) {
    fail(ErrorKind::peer, who_, call,
         "the group was aborted on this rank while this call was put on its stream; got an aborted group (" +
             abort_reason_ + "), expected one in use; destroy the group and make a new one");
  }
  ++entering_;
}

void CudaTransport::leave() {
  --entering_;
  if (aborted_) watch_broken();  // abort() may have passed calls over because this thread was here
}

// At the first wait of a call: from here on peers can hold it up. With the lock, so that abort() sees it, or it
// abort().
void CudaTransport::begin(Channel channel) {
  std::lock_guard<std::mutex> lock(awaited_mutex_);
  CallNow& now = calls_[static_cast<size_t>(channel)];
  if (now.begun || aborted_) return;
  now.begun = true;
  watchdog_->begin(channel, now.sequence, now.deadline);
}

CudaTransport::CallNow CudaTransport::call_now(Channel channel) {
  std::lock_guard<std::mutex> lock(awaited_mutex_);
  return calls_[static_cast<size_t>(channel)];
}

// Called by the watchdog's thread.
std::string CudaTransport::diagnose(Channel channel, uint64_t sequence, Doubt doubt, const std::string& failure) {
  const std::string name = std::string(to_string(channel)) + " #" + std::to_string(sequence);
  if (!failure.empty()) return who_.prefix(name) + "the device failed while this call was on it: " + failure;
  std::ostringstream missing, gone;
  const auto note = [](std::ostringstream& list, const std::string& text) {
    list << (list.str().empty() ? "" : "; ") << text;
  };
  if (channel == Channel::memory) {  // a host call into NCCL
    if (doubt == Doubt::none) return "";
    for (int peer = 0; peer < who_.world; ++peer) {
      if (peer != who_.rank) note(missing, tables_->last_calls(peer));
    }
    return who_.prefix(name) +
           "NCCL has not opened its communicator or window by the deadline; got no answer from it " +
           "while the other ranks are at: " + missing.str() + "; look at the rank that is behind";
  }
  std::map<int, std::string> owed, lost_peers;
  {
    std::lock_guard<std::mutex> lock(awaited_mutex_);
    for (const auto& [key, value] : awaited_) {
      const auto [of, flag, peer] = key;
      if (of != channel) continue;
      // In this order: a rank that leaves in good order has set all its flags before it is seen to leave.
      const std::string lost = tables_->lost(peer);
      if (tables_->flag_word(who_.rank, of, flag, peer).load() >= value) continue;
      owed[peer] += (owed[peer].empty() ? "" : ", ") + std::string(to_string(flag));
      if (!lost.empty()) lost_peers[peer] = lost;
    }
  }
  for (const auto& [peer, flags] : owed) note(missing, tables_->last_calls(peer) + " owes its flags: " + flags);
  for (const auto& [peer, lost] : lost_peers) note(gone, lost);
  // Without the number: calls that are over may not be known to be.
  if (!gone.str().empty()) {
    return who_.prefix(to_string(channel)) + gone.str() + " while the device waits: " + missing.str();
  }
  if (doubt == Doubt::none || (doubt == Doubt::overdue && missing.str().empty())) return "";
  if (missing.str().empty()) missing << "every flag has arrived; this rank's own stream is behind";
  return who_.prefix(name) + "not over at its deadline: " + missing.str() +
         "; look at that rank, or set a longer timeout";
}

void CudaTransport::abort(const std::string& reason) {
  if (guard_.in_child()) return;
  {
    std::lock_guard<std::mutex> lock(awaited_mutex_);
    if (aborted_.exchange(true)) return;
    abort_reason_ = reason;
  }
  if (auto self = weak_from_this().lock()) keep_for_ever(std::move(self));
  arena_->quarantine();
  control_->abort(reason);
  // Not on the watchdog's thread: the driver may be blocked, and that thread is the one to end it.
  if (!watchdog_->is_this_thread()) watch_broken();
}

// A call that broke in the middle never came to complete(). Called again until it has seen every channel.
void CudaTransport::watch_broken() {
  for (int c = 0; c < kChannels; ++c) {
    const auto channel = static_cast<Channel>(c);
    // A thread that is putting a wait on a stream may be blocked by the driver, and so would this one be.
    if (entering_ > 0) return;
    if (broken_watched_[static_cast<size_t>(c)].exchange(true)) continue;
    const CallNow call = call_now(channel);
    if (call.sequence == 0) continue;
    try {
      watch(channel, call);
    } catch (const Error&) {  // the device is lost: nothing on it goes on
    }
  }
}

void CudaTransport::give_up(const std::string& reason) {
  abort(reason);
  if (!guard_.in_child()) watchdog_->keep_releasing();
}

// By the watchdog's thread, again and again: a peer that is late may set a word back to its own small value.
bool CudaTransport::release_waits() {
  {
    std::lock_guard<std::mutex> lock(awaited_mutex_);
    for (const auto& [key, value] : awaited_) {
      const auto [channel, flag, peer] = key;
      tables_->flag_word(who_.rank, channel, flag, peer).store(kReleased);
    }
  }
  if (entering_ > 0) return true;
  watch_broken();
  for (Stream stream : all_streams()) {
    if (stream && driver().stream_query(stream) == kNotReady) return true;
  }
  return false;
}

void CudaTransport::close(const std::string& reason) {
  if (guard_.in_child() || closed_.exchange(true)) return;
  if (!aborted_) {
    for (Stream stream : all_streams()) {
      if (stream) driver().stream_synchronize(stream);
    }
  }
  if (aborted_) return;  // also by the watchdog, meanwhile
  watchdog_->stop();
  if (comm_) {
    arena_->deregister(comm_);
    nccl().abort(comm_);
    comm_ = nullptr;
  }
  control_->close(reason);
}

}  // namespace tide::cuda
