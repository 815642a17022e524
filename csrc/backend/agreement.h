// What ranks tell each other before a call moves a byte: enough to see that all mean the same call, and where each
// one's window lies. A mismatch is an error on every rank and loses nothing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "request.h"

namespace tide {

struct CallRecord {
  std::string text;       // "all_gather bfloat16[4096]": for people, and for the journal
  uint64_t contract = 0;  // hash of everything that must be the same on all ranks
  // Hash of the types of separate inputs. Not in the contract: a gradient may be fp32 on a rank that accumulated it and
  // bf16 on one that did not, and such a call is right.
  uint64_t input_types = 0;
  int64_t window_offset = -1;  // -1: none
  int64_t window_bytes = 0;
  bool output_in_arena = false;
  int64_t staging_bytes = 0;  // ranks that cut chunks differently would read the wrong bytes
  int64_t plain_bytes = 0;    // ranks that differ would not meet at calls of sizes in between
  std::string problem;        // why this rank cannot take part ("no memory for ..."); empty: it can
  std::vector<int64_t> in_splits, out_splits;
  // all-to-all: of tensors that are not contiguous.
  std::optional<Strided> in_form, out_form;

  // Whether there is something that peers may write; a rank of an all-to-all may receive nothing.
  bool has_output() const;
  // A rank that needs a window and has none.
  bool lacks_window() const { return window_bytes > 0 && window_offset < 0; }

  std::string encode() const;
  static CallRecord decode(const std::string& bytes);
};

// text and contract of a request, as this rank sees it.
CallRecord describe(const Request& request);

// Null when all records are compatible; otherwise what differs: "rank 1 passed ..., rank 0 passed ...".
std::optional<std::string> mismatch(const std::vector<CallRecord>& records);

}  // namespace tide
