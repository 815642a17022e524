// The one place that formats errors. Every message reads
//   tide[rank 3/8, group "dp", all_gather #417]: what happened; got ..., expected ...; do ...
#pragma once

#include <stdexcept>
#include <string>

#include "types.h"

namespace tide {

// usage:   the caller passed something that cannot work; the group stays usable.
// peer:    another rank is gone; names it.
// timeout: the deadline passed; names the ranks waited for and what each did last.
// driver:  the operating system or a driver refused; names the call and the code.
enum class ErrorKind : uint8_t { usage, peer, timeout, driver };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// Who is speaking: filled in once per group and completed per call.
struct Speaker {
  int rank = 0;
  int world = 1;
  std::string group;

  std::string prefix(const std::string& call = "") const;
};

[[noreturn]] void fail(ErrorKind kind, const Speaker& who, const std::string& call, const std::string& what);

// "memfd_create failed: Too many open files (errno 24)"
std::string errno_text(const std::string& call, int error_number);

}  // namespace tide
