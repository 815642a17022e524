#include "executor.h"

#include <cstring>

#include "../kernels/accumulate.h"
#include "../kernels/copy.h"
#include "error.h"

namespace tide {

namespace {

class Run {
 public:
  Run(const Plan& plan, const Execution& call, Transport* transport, const Wait& wait)
      : plan_(plan), call_(call), transport_(transport), wait_(wait) {}

  void step(const Step& s) {
    switch (s.kind) {
      case StepKind::copy:
        if (s.rows > 1) {
          copy_rows(s, {s.rows, s.bytes, s.to_pitch, s.from_pitch});
        } else {
          copy(target(s.to, s.bytes), at(s.from, s.bytes), s.bytes, own(s.to) && own(s.from));
        }
        return;
      case StepKind::fill:
        fill(at(s.to, s.bytes), s.bytes);
        return;
      case StepKind::signal:
        transport_->signal(call_.channel, s.peer, s.flag, value(s));
        return;
      case StepKind::wait:
        transport_->wait(call_.channel, s.peer, s.flag, value(s), wait_);
        return;
      case StepKind::accumulate:
        accumulate(s);
        return;
    }
  }

 private:
  uint64_t value(const Step& s) const { return flag_value(call_.sequence, s.value); }

  std::byte* at(const Address& a, int64_t bytes) {
    switch (a.space) {
      case Space::input:
        // Steps never write an input: the planners only name it as a source.
        return const_cast<std::byte*>(call_.buffers.inputs[static_cast<size_t>(a.index)]) + a.offset;
      case Space::output:
        return call_.buffers.output + a.offset;
      case Space::window:
        return transport_->address(a.index, call_.windows[static_cast<size_t>(a.index)] + a.offset, bytes);
      case Space::multicast:
        throw Error(ErrorKind::usage, "tide: a plan may only copy to multicast memory; nothing reads it");
      case Space::none:
        return nullptr;
    }
    return nullptr;
  }

  // Every rank's window lies where this rank's does, or there would be no multicast.
  std::byte* target(const Address& a, int64_t bytes) {
    if (a.space != Space::multicast) return at(a, bytes);
    return transport_->multicast_address(call_.windows[static_cast<size_t>(plan_.rank)] + a.offset, bytes);
  }

  bool own(const Address& a) const {
    return a.space != Space::multicast && (a.space != Space::window || a.index == plan_.rank);
  }

  void copy(std::byte* to, const std::byte* from, int64_t bytes, bool within) {
    if (to == from) return;  // already at its place
    if (transport_ && within) {
      transport_->place(call_.channel, to, from, bytes);
    } else if (transport_) {
      transport_->copy(call_.channel, to, from, bytes);
    } else {
      std::memcpy(to, from, static_cast<size_t>(bytes));
    }
  }

  void copy_rows(const Step& s, const Rows& rows) {
    std::byte* to = at(s.to, rows.to_reach());
    const std::byte* from = at(s.from, rows.from_reach());
    if (transport_ && own(s.to) && own(s.from)) {
      transport_->place_rows(call_.channel, to, from, rows);
    } else if (transport_) {
      transport_->copy_rows(call_.channel, to, from, rows);
    } else {
      tide::copy_rows(to, from, rows.rows, rows.bytes, rows.to_pitch, rows.from_pitch);
    }
  }

  void fill(std::byte* to, int64_t bytes) {
    if (transport_) {
      transport_->fill(call_.channel, to, bytes);
    } else {
      std::memset(to, 0, static_cast<size_t>(bytes));
    }
  }

  void accumulate(const Step& s) {
    const ElementType in = s.type == ElementType::bytes ? call_.in_type : s.type;
    AccumulateArgs args;
    args.own = at(s.from, s.bytes);
    args.own_rank = plan_.rank;
    args.ranks = plan_.world;
    args.numel = s.bytes / element_size(in);
    args.out = at(s.to, args.numel * element_size(call_.out_type));
    args.scale = call_.scale;
    if (plan_.world > 1) {
      const int64_t reach = s.stride * (plan_.world - 2) + s.bytes;
      args.staged = transport_->address(plan_.rank, call_.windows[static_cast<size_t>(plan_.rank)] + s.staged, reach);
      args.stride = s.stride;
    }
    if (transport_) {
      transport_->accumulate(call_.channel, in, call_.out_type, args);
    } else {
      tide::accumulate(in, call_.out_type, args);
    }
  }

  const Plan& plan_;
  const Execution& call_;
  Transport* transport_;
  const Wait& wait_;
};

}  // namespace

uint64_t flag_value(uint64_t sequence, int64_t value) {
  return (sequence << kChunkBits) + static_cast<uint64_t>(value);
}

void execute(const Plan& plan, const Execution& call, Transport* transport, const Wait& wait) {
  Run run(plan, call, transport, wait);
  for (const Step& step : plan.steps) run.step(step);
}

}  // namespace tide
