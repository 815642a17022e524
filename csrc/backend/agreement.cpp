#include "agreement.h"

#include <algorithm>
#include <cstring>

#include "error.h"

namespace tide {

namespace {

void put(std::string& out, const void* data, size_t bytes) { out.append(static_cast<const char*>(data), bytes); }
void put(std::string& out, uint64_t v) { put(out, &v, sizeof v); }
void put(std::string& out, const std::string& v) {
  put(out, v.size());
  out += v;
}
void put(std::string& out, const std::vector<int64_t>& v) {
  put(out, v.size());
  put(out, v.data(), v.size() * sizeof(int64_t));
}
void put(std::string& out, const std::optional<Strided>& v) {
  put(out, v ? std::vector<int64_t>{v->stride, v->rows, v->row_bytes, v->pitch} : std::vector<int64_t>{});
}

class Reader {
 public:
  explicit Reader(const std::string& bytes, size_t at) : bytes_(bytes), at_(at) {}
  uint64_t word() {
    uint64_t v;
    std::memcpy(&v, take(sizeof v), sizeof v);
    return v;
  }
  std::string text() {
    const size_t n = word();
    return std::string(take(n), n);
  }
  std::vector<int64_t> list() {
    std::vector<int64_t> v(word());
    if (!v.empty()) std::memcpy(v.data(), take(v.size() * sizeof(int64_t)), v.size() * sizeof(int64_t));
    return v;
  }
  std::optional<Strided> form() {
    const std::vector<int64_t> v = list();
    if (v.size() != 4) return std::nullopt;
    return Strided{v[0], v[1], v[2], v[3]};
  }

 private:
  const char* take(size_t n) {
    if (n > bytes_.size() - at_) throw Error(ErrorKind::usage, "tide: a peer's call record is cut short");
    const char* p = bytes_.data() + at_;
    at_ += n;
    return p;
  }
  const std::string& bytes_;
  size_t at_;
};

std::string list(const std::vector<int64_t>& v) {
  std::string text = "[";
  for (size_t i = 0; i < v.size() && i < 16; ++i) text += (i ? ", " : "") + std::to_string(v[i]);
  return text + (v.size() > 16 ? ", ...]" : "]");
}

}  // namespace

// The text comes first and ends with a NUL, so that a peer can print a record without decoding it.
std::string CallRecord::encode() const {
  std::string out = text;
  out.push_back('\0');
  put(out, contract);
  put(out, input_types);
  put(out, static_cast<uint64_t>(window_offset));
  put(out, static_cast<uint64_t>(window_bytes));
  put(out, uint64_t{output_in_arena});
  put(out, static_cast<uint64_t>(staging_bytes));
  put(out, static_cast<uint64_t>(plain_bytes));
  put(out, problem);
  put(out, in_splits);
  put(out, out_splits);
  put(out, in_form);
  put(out, out_form);
  return out;
}

bool CallRecord::has_output() const {
  if (out_splits.empty()) return true;
  return std::any_of(out_splits.begin(), out_splits.end(), [](int64_t n) { return n > 0; });
}

CallRecord CallRecord::decode(const std::string& bytes) {
  CallRecord record;
  record.text = bytes.c_str();
  Reader reader(bytes, record.text.size() + 1);
  record.contract = reader.word();
  record.input_types = reader.word();
  record.window_offset = static_cast<int64_t>(reader.word());
  record.window_bytes = static_cast<int64_t>(reader.word());
  record.output_in_arena = reader.word() != 0;
  record.staging_bytes = static_cast<int64_t>(reader.word());
  record.plain_bytes = static_cast<int64_t>(reader.word());
  record.problem = reader.text();
  record.in_splits = reader.list();
  record.out_splits = reader.list();
  record.in_form = reader.form();
  record.out_form = reader.form();
  return record;
}

CallRecord describe(const Request& q) {
  CallRecord record;
  const bool all_to_all = q.op == Channel::all_to_all;
  record.text = std::string(to_string(q.op)) + " " + q.type_name;
  if (!all_to_all) record.text += "[" + std::to_string(q.numel) + "]";
  if (q.op == Channel::reduce_scatter) {
    record.text += std::string(" ") + to_string(q.reduction) + " scale " + std::to_string(q.scale);
  }
  if (q.layout) record.text += " layout " + q.layout->describe();
  int64_t scale_bits;
  std::memcpy(&scale_bits, &q.scale, sizeof scale_bits);
  record.contract = hash_words({static_cast<int64_t>(q.op), q.scalar_type, q.separate_inputs ? 0 : q.itemsize,
                                q.out_itemsize, all_to_all ? 0 : q.numel, static_cast<int64_t>(q.reduction), scale_bits,
                                q.layout ? static_cast<int64_t>(q.layout->hash()) : 0});
  if (q.separate_inputs) {
    std::vector<int64_t> types{static_cast<int64_t>(q.in_type)};
    for (ElementType type : q.in_types) types.push_back(static_cast<int64_t>(type));
    record.input_types = hash_words(types);
  }
  record.output_in_arena = q.output_in_arena;
  if (all_to_all) {
    record.in_splits = q.in_splits;
    record.out_splits = q.out_splits;
    record.in_form = q.in_form;
    record.out_form = q.out_form;
    record.text += " in " + list(q.in_splits) + " out " + list(q.out_splits);
  }
  return record;
}

std::optional<std::string> mismatch(const std::vector<CallRecord>& records) {
  for (size_t r = 0; r < records.size(); ++r) {
    if (!records[r].problem.empty()) return "rank " + std::to_string(r) + " cannot take part: " + records[r].problem;
  }
  for (size_t r = 1; r < records.size(); ++r) {
    if (records[r].staging_bytes == records[0].staging_bytes) continue;
    return "ranks have different staging budgets; got " + std::to_string(records[0].staging_bytes) +
           " bytes on rank 0 and " + std::to_string(records[r].staging_bytes) + " on rank " + std::to_string(r) +
           ", expected the same on every rank; set TIDE_STAGING_BYTES (or TIDE_CUDA_STAGING_BYTES) alike everywhere";
  }
  for (size_t r = 1; r < records.size(); ++r) {
    if (records[r].plain_bytes == records[0].plain_bytes) continue;
    return "ranks leave plain CUDA calls of different sizes to nccl; got fewer than " +
           std::to_string(records[0].plain_bytes) + " bytes on rank 0 and " + std::to_string(records[r].plain_bytes) +
           " on rank " + std::to_string(r) +
           ", expected the same on every rank; set TIDE_CUDA_PLAIN_BYTES alike everywhere";
  }
  for (size_t r = 1; r < records.size(); ++r) {
    if (records[r].contract == records[0].contract) continue;
    return "ranks called with different arguments; got " + records[0].text + " on rank 0 and " + records[r].text +
           " on rank " + std::to_string(r) +
           ", expected the same on every rank; pass equal sizes, dtypes, operations "
           "and layouts everywhere";
  }
  for (size_t from = 0; from < records.size(); ++from) {
    if (records[from].in_splits.empty()) continue;
    for (size_t to = 0; to < records.size(); ++to) {
      const int64_t sent = records[from].in_splits[to], expected = records[to].out_splits[from];
      if (sent == expected) continue;
      return "split sizes do not match; rank " + std::to_string(from) + " sends " + std::to_string(sent) +
             " elements to rank " + std::to_string(to) + ", which expects " + std::to_string(expected) +
             "; input_split_sizes[" + std::to_string(to) + "] there must equal output_split_sizes[" +
             std::to_string(from) + "] here";
    }
  }
  return std::nullopt;
}

}  // namespace tide
