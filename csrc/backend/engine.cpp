#include "engine.h"

#include <cstring>
#include <numeric>

namespace tide {

namespace {

constexpr size_t kCachedPlans = 512;
// A rank whose own arguments are wrong leaves a note for its peers and does not wait long for them.
constexpr auto kProblemWait = std::chrono::seconds(1);
constexpr char kBare[] = "tide: ";  // how errors begin that were raised where neither rank nor call is known

// Gives a window back when the call is over, whichever way it ends.
class Staged {
 public:
  Staged(std::shared_ptr<Transport> transport, Channel channel, int64_t bytes, std::string* why)
      : transport_(std::move(transport)), channel_(channel) {
    if (bytes > 0) window_ = transport_->acquire(channel_, bytes, why);
  }
  ~Staged() {
    if (window_) transport_->release(channel_, *window_);
  }
  Staged(const Staged&) = delete;
  Staged& operator=(const Staged&) = delete;
  const std::optional<Window>& window() const { return window_; }

 private:
  std::shared_ptr<Transport> transport_;
  Channel channel_;
  std::optional<Window> window_;
};

std::string plan_key(const Request& q, Path path) {
  std::string key;
  auto put = [&key](const void* data, size_t bytes) { key.append(static_cast<const char*>(data), bytes); };
  const uint64_t hash = q.layout ? q.layout->hash() : 0;
  const int64_t words[] = {static_cast<int64_t>(q.op),
                           static_cast<int64_t>(path),
                           q.numel,
                           q.itemsize,
                           q.out_itemsize,
                           q.placed,
                           q.separate_inputs,
                           q.multicast,
                           static_cast<int64_t>(q.in_type),
                           static_cast<int64_t>(q.layout != nullptr)};
  put(words, sizeof words);
  put(&hash, sizeof hash);
  put(q.in_types.data(), q.in_types.size() * sizeof(ElementType));
  put(q.in_splits.data(), q.in_splits.size() * sizeof(int64_t));
  put(q.out_splits.data(), q.out_splits.size() * sizeof(int64_t));
  put(q.peer_offsets.data(), q.peer_offsets.size() * sizeof(int64_t));
  return key;
}

// In a zero-copy all-to-all: where what `rank` sends begins in each peer's output.
std::vector<int64_t> peer_offsets(const std::vector<CallRecord>& records, int rank) {
  std::vector<int64_t> result;
  for (const CallRecord& peer : records) {
    result.push_back(std::accumulate(peer.out_splits.begin(), peer.out_splits.begin() + rank, int64_t{0}));
  }
  return result;
}

// In a zero-copy all-gather: a multicast write lands at the same place of every segment, so all outputs must lie there.
void offer_multicast(const std::vector<CallRecord>& records, int rank, Transport& transport, Capabilities* known) {
  const CallRecord& mine = records[static_cast<size_t>(rank)];
  const Multicast multicast = transport.multicast(mine.window_offset, mine.window_bytes);
  known->multicast = multicast.usable;
  known->no_multicast_reason = multicast.why_not;
  for (const CallRecord& record : records) {
    if (!multicast.usable || record.window_offset == mine.window_offset) continue;
    known->multicast = false;
    known->no_multicast_reason = "ranks' outputs lie at different places in their segments";
  }
}

}  // namespace

Engine::Engine(Speaker who, std::shared_ptr<Bootstrap> bootstrap, EngineOptions options)
    : who_(std::move(who)),
      bootstrap_(std::move(bootstrap)),
      options_(std::move(options)),
      recorder_(options_.recorded_calls) {}

Engine::~Engine() { shutdown(); }

void Engine::connect() {
  std::lock_guard<std::mutex> once(connect_mutex_);
  if (connected()) return;
  Connection result;
  raise_if_poisoned("connect");
  try {
    if (who_.world > 1) result = options_.connect(who_, *bootstrap_);
  } catch (const std::exception& error) {
    // Ranks that tried again one by one would pair calls that do not belong together.
    poison(error.what());
    throw;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  transport_ = result.transport;
  no_transport_ = result.reason;
  connected_ = true;
}

bool Engine::connected() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return connected_;
}

std::pair<bool, std::string> Engine::shared_memory() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!connected_) return {false, "not connected yet: that happens at the first collective"};
  if (who_.world == 1) return {false, "one rank"};
  return {transport_ != nullptr, no_transport_};
}

Capabilities Engine::capabilities() const {
  Capabilities c;
  c.device = options_.device;
  c.can_accumulate = options_.can_accumulate;
  c.shared_memory = transport_ != nullptr;
  c.no_memory_reason = no_transport_;
  c.plain_bytes = options_.plain_bytes;
  c.plain_slots = plain_slots_;
  return c;
}

Selection Engine::preselect(const Request& request, const std::string& inner_only_reason) const {
  std::lock_guard<std::mutex> lock(mutex_);
  Capabilities known = capabilities();
  known.shared_memory = known.shared_memory || !connected_;
  known.inner_only_reason = inner_only_reason;
  return select(known, request);
}

void Engine::expect_plain_slots() {
  std::lock_guard<std::mutex> lock(mutex_);
  plain_slots_ = true;
}

std::shared_ptr<Transport> Engine::transport() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return transport_;
}

std::shared_ptr<Arena> Engine::arena_if_connected() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return transport_ ? transport_->arena() : nullptr;
}

std::shared_ptr<Arena> Engine::arena(std::string* why) {
  connect();
  std::lock_guard<std::mutex> lock(mutex_);
  if (transport_) return transport_->arena();
  *why = who_.world == 1 ? "one rank" : no_transport_;
  return nullptr;
}

std::string Engine::poisoned() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return poisoned_;
}

void Engine::raise_if_poisoned(const std::string& call) const {
  const std::string earlier = poisoned();
  if (earlier.empty()) return;
  fail(ErrorKind::peer, who_, call,
       "the group cannot be used any more; an earlier failure: " + earlier + "; destroy the group and make a new one");
}

void Engine::poison(const std::string& reason) {
  std::shared_ptr<Transport> transport;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!poisoned_.empty()) return;
    poisoned_ = reason;
    transport = transport_;
  }
  if (transport) transport->abort(reason);
}

void Engine::abort(const std::string& reason) { poison(reason); }

void Engine::shutdown() {
  const std::string reason = "the process group was destroyed";
  std::shared_ptr<Transport> transport;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (poisoned_.empty()) {
      poisoned_ = reason;
      transport = transport_;
    }
  }
  if (transport) transport->close(reason);
  for (Lane& lane : lanes_) lane.stop();
  // The memory itself goes with the last storage in it.
  std::lock_guard<std::mutex> lock(mutex_);
  transport_.reset();
}

std::shared_ptr<const Plan> Engine::plan(const Request& request, Path path) {
  const std::string key = plan_key(request, path);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = plans_.find(key);
    if (found != plans_.end()) return found->second;
  }
  auto made = std::make_shared<const Plan>(make_plan(request, path, options_.staging));
  std::lock_guard<std::mutex> lock(mutex_);
  if (plans_.size() >= kCachedPlans) plans_.clear();  // a stream of ever new splits: start over
  plans_[key] = made;
  return made;
}

void Engine::guarded(const std::string& call, const std::function<void()>& body) {
  raise_if_poisoned(call);
  try {
    body();
  } catch (const Error& error) {
    // What the driver says knows nothing of ranks and calls.
    const std::string text = error.what();
    const bool bare = text.rfind(kBare, 0) == 0;
    const Error full(error.kind(), bare ? who_.prefix(call) + text.substr(std::strlen(kBare)) : text);
    if (error.kind() != ErrorKind::usage) poison(full.what());
    throw full;
  } catch (...) {
    poison("interrupted during " + call);
    throw;
  }
}

Selection Engine::run(const CollectiveCall& call, const Wait& wait) {
  std::optional<Selection> selection;
  guarded(wait.call, [&] { selection = carry_out(call, wait); });
  return *selection;
}

// A plan that breaks in the middle leaves flags and windows in an unknown state, whatever broke it.
void Engine::move(const Request& request, Path path, const Execution& execution, Transport* transport,
                  const Wait& wait) {
  try {
    execute(*plan(request, path), execution, transport, wait);
  } catch (const Error& error) {
    poison(error.what());
    throw;
  }
}

// Staging is made for a kind of call when it first needs it: by all ranks, in one order with other growth.
std::string Engine::provide(Transport& transport, Channel channel, const Wait& wait) {
  std::string why;
  Lane& memory = lane(Channel::memory);
  memory.run(memory.take_ticket(), [&] { why = transport.provide(channel, wait); }, wait.interrupted);
  return why;
}

Selection Engine::carry_out(const CollectiveCall& call, const Wait& wait) {
  Request q = call.request;
  connect();
  std::shared_ptr<Transport> transport;
  Capabilities known;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    transport = transport_;
    known = capabilities();
  }
  if (!transport && !call.problem.empty()) fail(ErrorKind::usage, who_, wait.call, call.problem);

  Selection selection = select(known, q);
  Execution execution;
  execution.channel = q.op;
  execution.buffers = call.buffers;
  execution.in_type = q.in_type;
  execution.out_type = q.out_type;
  execution.scale = q.scale;

  if (selection.path == Path::local) {
    recorder_.update(call.record_id, selection.path, selection.reason);
    execute(*plan(q, selection.path), execution, nullptr, wait);
    return selection;
  }
  if (!transport) return selection;

  // Everybody says what it means to do and where it may be written. Even calls for the inner backend pass here, so
  // that ranks which disagree hear of it instead of hanging in different places.
  auto& exchanges = exchanges_[static_cast<size_t>(q.op)];
  CallRecord mine = describe(q);
  mine.problem = call.problem;
  mine.staging_bytes = options_.staging.budget_bytes;
  mine.plain_bytes = options_.plain_bytes;
  auto meet = [&](const Wait& until) {
    const auto all = transport->exchange(q.op, ++exchanges, mine.encode(), until);
    std::vector<CallRecord> records;
    for (const auto& one : all) records.push_back(CallRecord::decode(one));
    if (auto problem = mismatch(records)) {
      transport->complete(q.op, exchanges);
      fail(ErrorKind::usage, who_, wait.call, *problem);
    }
    return records;
  };
  if (!call.problem.empty()) {
    Wait brief = wait;
    brief.deadline = std::min(wait.deadline, Clock::now() + kProblemWait);
    try {
      meet(brief);
    } catch (const Error&) {
      transport->complete(q.op, exchanges);
    }
    fail(ErrorKind::usage, who_, wait.call, call.problem);
  }

  std::optional<Staged> staged;
  auto offer_staging = [&] {
    const int64_t bytes = plan(q, Path::staged)->window_bytes;
    std::string why;
    staged.emplace(transport, q.op, bytes, &why);
    mine.window_offset = -1;
    mine.window_bytes = bytes;
    if (staged->window()) mine.window_offset = staged->window()->offset;
    // Where staging is not made yet, the records say whether anybody needs it.
    if (mine.lacks_window() && transport->provided(q.op)) {
      mine.problem = "no memory for " + std::to_string(bytes) + " bytes of staging: " + why +
                     "; raise TIDE_ARENA_BYTES or lower TIDE_STAGING_BYTES";
    }
  };
  mine.output_in_arena = false;
  if (selection.path == Path::staged || selection.path == Path::zero_copy) {
    const auto offset = q.output_in_arena ? transport->arena()->offset_of(call.buffers.output, call.output_bytes)
                                          : std::optional<int64_t>();
    if (offset) {
      mine.output_in_arena = true;
      mine.window_offset = *offset;
      mine.window_bytes = call.output_bytes;
    } else if (selection.path == Path::staged) {
      offer_staging();
    }
  }
  std::vector<CallRecord> records = meet(wait);

  size_t in_arena = 0, outputs = 0;
  bool lacking = false;
  for (const auto& record : records) {
    in_arena += record.output_in_arena;
    outputs += record.has_output();
    lacking = lacking || record.lacks_window();
    known.input_types_differ = known.input_types_differ || record.input_types != mine.input_types;
  }
  known.outputs_known = true;
  known.every_output_in_arena = outputs > 0 && in_arena == outputs;
  if (known.every_output_in_arena && q.op == Channel::all_gather) offer_multicast(records, q.rank, *transport, &known);
  selection = select(known, q);
  // Ranks that have been at their outputs so far may lack staging as well.
  if (selection.path == Path::staged && (lacking || in_arena > 0) && !transport->provided(q.op)) {
    known.no_staging_reason = provide(*transport, q.op, wait);
    selection = select(known, q);
  }
  if (selection.path == Path::staged && (lacking || in_arena > 0)) {
    // Some outputs lie in the arena and some do not, or staging is new: windows are agreed once more.
    if (in_arena > 0) {
      selection.reason = std::to_string(outputs - in_arena) + " of " + std::to_string(outputs) +
                         " ranks had no slot in the arena for the output";
    }
    if (!staged || mine.lacks_window()) offer_staging();
    records = meet(wait);
  }
  if (selection.path == Path::zero_copy && q.op == Channel::all_to_all) q.peer_offsets = peer_offsets(records, q.rank);
  q.multicast = selection.multicast;
  recorder_.update(call.record_id, selection.path, selection.reason);
  if (selection.path != Path::inner) {
    for (const auto& record : records) execution.windows.push_back(record.window_offset);
    // Not the ticket: a call that was given up before it met its peers has one on this rank alone.
    execution.sequence = exchanges;
    move(q, selection.path, execution, transport.get(), wait);
  }
  transport->complete(q.op, exchanges);
  return selection;
}

}  // namespace tide
