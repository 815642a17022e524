#include "engine.h"

#include <cstring>

#include "meeting.h"

namespace tide {

namespace {

constexpr size_t kCachedPlans = 512;
constexpr char kBare[] = "tide: ";  // how errors begin that were raised where neither rank nor call is known

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
  auto put_form = [&put](const std::optional<Strided>& form) {
    const Strided f = form.value_or(Strided{});  // whose rows have no bytes, as no other's
    const int64_t numbers[] = {f.stride, f.rows, f.row_bytes, f.pitch};
    put(numbers, sizeof numbers);
  };
  put(words, sizeof words);
  put(&hash, sizeof hash);
  put(q.in_types.data(), q.in_types.size() * sizeof(ElementType));
  put(q.in_splits.data(), q.in_splits.size() * sizeof(int64_t));
  put(q.out_splits.data(), q.out_splits.size() * sizeof(int64_t));
  put(q.peer_offsets.data(), q.peer_offsets.size() * sizeof(int64_t));
  put_form(q.in_form);
  put_form(q.out_form);
  for (const auto& form : q.peer_forms) put_form(form);
  return key;
}

// What all paths need to know of a call.
Execution execution_of(const CollectiveCall& call) {
  Execution execution;
  execution.channel = call.request.op;
  execution.buffers = call.buffers;
  execution.in_type = call.request.in_type;
  execution.out_type = call.request.out_type;
  execution.scale = call.request.scale;
  return execution;
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
  const Channel op = call.request.op;
  connect();
  std::shared_ptr<Transport> transport;
  Capabilities known;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    transport = transport_;
    known = capabilities();
  }
  if (!transport && !call.problem.empty()) fail(ErrorKind::usage, who_, wait.call, call.problem);

  Selection selection = select(known, call.request);
  if (selection.path == Path::local) {
    if (op == Channel::all_to_all) {  // which nobody else compares
      if (const auto problem = mismatch({describe(call.request)})) fail(ErrorKind::usage, who_, wait.call, *problem);
    }
    recorder_.update(call.record_id, selection.path, selection.reason);
    execute(*plan(call.request, selection.path), execution_of(call), nullptr, wait);
    return selection;
  }
  if (!transport) return selection;

  Meeting meeting(*this, transport, known, call, wait);
  selection = meeting.agree(selection.path);
  recorder_.update(call.record_id, selection.path, selection.reason);
  const uint64_t exchanges = exchanges_[static_cast<size_t>(op)];
  if (selection.path != Path::inner) {
    Execution execution = execution_of(call);
    execution.windows = meeting.windows();
    // Not the ticket: a call that was given up before it met its peers has one on this rank alone.
    execution.sequence = exchanges;
    move(meeting.request(), selection.path, execution, transport.get(), wait);
  } else {
    // A rank that announced this call may have been interrupted since; the inner backend would wait for it.
    transport->check_peers(wait.call);
  }
  transport->complete(op, exchanges);
  recorder_.note_kernel_copies(call.record_id, transport->kernel_copies(op));
  return selection;
}

}  // namespace tide
