#include "stream_words.h"

namespace tide::cuda {

namespace {

constexpr size_t kMost = 128;  // of one call; the driver takes some 256

void give_one(const StreamWord& w) {
  if (w.wait) {
    check(driver().stream_wait_value(w.stream, w.word, w.value, kWaitGreaterOrEqual), "cuStreamWaitValue64");
  } else {
    check(driver().stream_write_value(w.stream, w.word, w.value, kWriteDefault), "cuStreamWriteValue64");
  }
}

}  // namespace

size_t end_of_run(const std::vector<StreamWord>& words, size_t first) {
  size_t end = first;
  while (end < words.size() && end - first < kMost && words[end].stream == words[first].stream) ++end;
  return end;
}

void give(const std::vector<StreamWord>& words, size_t first, size_t end) {
  if (end - first == 1 || !driver().stream_words) {
    for (size_t i = first; i < end; ++i) give_one(words[i]);
    return;
  }
  std::vector<WordOperation> operations(end - first);
  for (size_t i = first; i < end; ++i) {
    WordOperation& o = operations[i - first];
    o.operation = words[i].wait ? WordOperation::kWait64 : WordOperation::kWrite64;
    o.word = words[i].word;
    o.value = words[i].value;
    o.flags = words[i].wait ? kWaitGreaterOrEqual : kWriteDefault;
  }
  check(driver().stream_words(words[first].stream, static_cast<unsigned>(operations.size()), operations.data(), 0),
        "cuStreamBatchMemOp");
}

}  // namespace tide::cuda
