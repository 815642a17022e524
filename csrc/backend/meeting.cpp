#include "meeting.h"

#include <algorithm>
#include <numeric>

namespace tide {

namespace {

// A rank whose own arguments are wrong leaves a note for its peers and does not wait long for them.
constexpr auto kProblemWait = std::chrono::seconds(1);

// In a zero-copy all-to-all: where what `rank` sends begins in each peer's output.
std::vector<int64_t> peer_offsets(const std::vector<CallRecord>& records, int rank) {
  std::vector<int64_t> result;
  for (const CallRecord& peer : records) {
    result.push_back(std::accumulate(peer.out_splits.begin(), peer.out_splits.begin() + rank, int64_t{0}));
  }
  return result;
}

std::vector<std::optional<Strided>> peer_forms(const std::vector<CallRecord>& records) {
  std::vector<std::optional<Strided>> result;
  for (const CallRecord& peer : records) result.push_back(peer.out_form);
  return result;
}

// In an all-to-all: why what some rank sends cannot go straight into its reader's output; "" when it can.
std::string unfit(const std::vector<CallRecord>& records, const StridedLimits& limits) {
  for (size_t writer = 0; writer < records.size(); ++writer) {
    for (size_t reader = 0; reader < records.size(); ++reader) {
      if (!records[writer].in_form || records[writer].in_splits[reader] == 0) continue;
      const std::string why = do_not_fit(records[writer].in_form, records[reader].out_form, limits);
      if (!why.empty()) return why + ", from rank " + std::to_string(writer) + " to rank " + std::to_string(reader);
    }
  }
  return "";
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

StagedWindow::StagedWindow(std::shared_ptr<Transport> transport, Channel channel, int64_t bytes, std::string* why)
    : transport_(std::move(transport)), channel_(channel) {
  if (bytes > 0) window_ = transport_->acquire(channel_, bytes, why);
}

StagedWindow::~StagedWindow() {
  if (window_) transport_->release(channel_, *window_);
}

Engine::Meeting::Meeting(Engine& engine, std::shared_ptr<Transport> transport, Capabilities known,
                         const CollectiveCall& call, const Wait& wait)
    : engine_(engine),
      transport_(std::move(transport)),
      known_(std::move(known)),
      call_(call),
      wait_(wait),
      request_(call.request) {}

Selection Engine::Meeting::agree(Path wished) {
  describe_call();
  if (!call_.problem.empty()) raise_problem();
  offer_window(wished);
  meet(wait_);
  learn();
  Selection selection = select(known_, request_);
  // Ranks that have been at their outputs so far may lack staging as well.
  if (staging_needed(selection) && !transport_->provided(request_.op)) {
    known_.no_staging_reason = engine_.provide(*transport_, request_.op, wait_);
    selection = select(known_, request_);
  }
  if (staging_needed(selection)) meet_for_staging(&selection);
  if (selection.path == Path::zero_copy && request_.op == Channel::all_to_all) {
    request_.peer_offsets = peer_offsets(records_, request_.rank);
    request_.peer_forms = peer_forms(records_);
  }
  request_.multicast = selection.multicast;
  return selection;
}

std::vector<int64_t> Engine::Meeting::windows() const {
  std::vector<int64_t> offsets;
  for (const CallRecord& record : records_) offsets.push_back(record.window_offset);
  return offsets;
}

void Engine::Meeting::describe_call() {
  mine_ = describe(request_);
  mine_.problem = call_.problem;
  mine_.staging_bytes = engine_.options_.staging.budget_bytes;
  mine_.plain_bytes = engine_.options_.plain_bytes;
}

// Found by this rank alone: its peers are told, if they come soon.
void Engine::Meeting::raise_problem() {
  Wait brief = wait_;
  brief.deadline = std::min(wait_.deadline, Clock::now() + kProblemWait);
  try {
    meet(brief);
  } catch (const Error&) {
    transport_->complete(request_.op, engine_.exchanges_[static_cast<size_t>(request_.op)]);
  }
  fail(ErrorKind::usage, engine_.who_, wait_.call, call_.problem);
}

void Engine::Meeting::offer_window(Path wished) {
  mine_.output_in_arena = false;
  if (wished != Path::staged && wished != Path::zero_copy) return;
  const auto offset = request_.output_in_arena
                          ? transport_->arena()->offset_of(call_.buffers.output, call_.output_bytes)
                          : std::optional<int64_t>();
  if (offset) {
    mine_.output_in_arena = true;
    mine_.window_offset = *offset;
    mine_.window_bytes = call_.output_bytes;
  } else if (wished == Path::staged) {
    offer_staging();
  }
}

void Engine::Meeting::offer_staging() {
  const int64_t bytes = engine_.plan(request_, Path::staged)->window_bytes;
  std::string why;
  staged_.emplace(transport_, request_.op, bytes, &why);
  mine_.window_offset = -1;
  mine_.window_bytes = bytes;
  if (staged_->window()) mine_.window_offset = staged_->window()->offset;
  // Where staging is not made yet, the records say whether anybody needs it.
  if (mine_.lacks_window() && transport_->provided(request_.op)) {
    mine_.problem = "no memory for " + std::to_string(bytes) + " bytes of staging: " + why +
                    "; raise TIDE_ARENA_BYTES or lower TIDE_STAGING_BYTES";
  }
}

// One exchange of records. What does not fit together raises on every rank.
void Engine::Meeting::meet(const Wait& until) {
  uint64_t& exchanges = engine_.exchanges_[static_cast<size_t>(request_.op)];
  const auto all = transport_->exchange(request_.op, ++exchanges, mine_.encode(), until);
  records_.clear();
  for (const auto& one : all) records_.push_back(CallRecord::decode(one));
  if (auto problem = mismatch(records_)) {
    transport_->complete(request_.op, exchanges);
    fail(ErrorKind::usage, engine_.who_, wait_.call, *problem);
  }
}

void Engine::Meeting::learn() {
  for (const CallRecord& record : records_) {
    in_arena_ += record.output_in_arena;
    outputs_ += record.has_output();
    lacking_ = lacking_ || record.lacks_window();
    known_.input_types_differ = known_.input_types_differ || record.input_types != mine_.input_types;
  }
  known_.outputs_known = true;
  known_.every_output_in_arena = outputs_ > 0 && in_arena_ == outputs_;
  if (known_.every_output_in_arena && request_.op == Channel::all_gather) {
    offer_multicast(records_, request_.rank, *transport_, &known_);
  }
  known_.unfit_reason = unfit(records_, strided_limits(known_.device));
}

// Some outputs lie in the arena and some do not, they do but rows do not fit, or staging is new.
bool Engine::Meeting::staging_needed(const Selection& selection) const {
  return selection.path == Path::staged && (lacking_ || in_arena_ > 0);
}

// Windows are agreed once more.
void Engine::Meeting::meet_for_staging(Selection* selection) {
  if (in_arena_ > 0 && in_arena_ < outputs_) {
    selection->reason = std::to_string(outputs_ - in_arena_) + " of " + std::to_string(outputs_) +
                        " ranks had no slot in the arena for the output";
  }
  if (!staged_ || mine_.lacks_window()) offer_staging();
  meet(wait_);
}

}  // namespace tide
