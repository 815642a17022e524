// One call's agreement: every rank says what it means to do and where it may be written, and all choose one way. Even
// calls for the inner backend pass here, so that ranks which disagree hear of it instead of hanging in different
// places.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agreement.h"
#include "engine.h"

namespace tide {

// A window of staging; gives it back when the call is over, whichever way that ends.
class StagedWindow {
 public:
  StagedWindow(std::shared_ptr<Transport> transport, Channel channel, int64_t bytes, std::string* why);
  ~StagedWindow();
  StagedWindow(const StagedWindow&) = delete;
  StagedWindow& operator=(const StagedWindow&) = delete;
  const std::optional<Window>& window() const { return window_; }

 private:
  std::shared_ptr<Transport> transport_;
  Channel channel_;
  std::optional<Window> window_;
};

// Lives until the call's bytes have moved: it holds this rank's staging.
class Engine::Meeting {
 public:
  Meeting(Engine& engine, std::shared_ptr<Transport> transport, Capabilities known, const CollectiveCall& call,
          const Wait& wait);

  // The way that all ranks take; `wished` is what this rank would do by itself. Raises what one of them cannot do.
  Selection agree(Path wished);

  // The rest holds after agree(). The request, with what was learned of the peers:
  const Request& request() const { return request_; }
  // Where each rank may be written.
  std::vector<int64_t> windows() const;

 private:
  void describe_call();
  [[noreturn]] void raise_problem();
  void offer_window(Path wished);
  void offer_staging();
  void meet(const Wait& until);
  void learn();
  bool staging_needed(const Selection& selection) const;
  void meet_for_staging(Selection* selection);

  Engine& engine_;
  std::shared_ptr<Transport> transport_;
  Capabilities known_;
  const CollectiveCall& call_;
  const Wait& wait_;
  Request request_;
  CallRecord mine_;
  std::optional<StagedWindow> staged_;
  // Of all ranks, from the last exchange; the counts and `lacking_` from the first one.
  std::vector<CallRecord> records_;
  size_t in_arena_ = 0, outputs_ = 0;
  bool lacking_ = false;  // a rank needs a window and has none
};

}  // namespace tide
