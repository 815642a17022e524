#include "strided.h"

#include <algorithm>

namespace tide {

namespace {

struct Dim {
  int64_t size, stride;  // elements
};

// Dims 1 and on without those of size 1, neighbours joined where one goes on where the other ends.
std::vector<Dim> joined(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  std::vector<Dim> result;
  for (size_t d = 1; d < sizes.size(); ++d) {
    if (sizes[d] == 1) continue;
    if (!result.empty() && result.back().stride == sizes[d] * strides[d]) {
      result.back() = {result.back().size * sizes[d], strides[d]};
    } else {
      result.push_back({sizes[d], strides[d]});
    }
  }
  return result;
}

std::string bytes(int64_t n) { return std::to_string(n) + " bytes"; }

// Walks through the bytes of a tensor, without its gaps.
class Walk {
 public:
  Walk(const std::optional<Strided>& form, int64_t at) : form_(form), at_(at) {}

  void advance(int64_t bytes) { at_ += bytes; }
  int64_t offset() const {
    if (!form_) return at_;
    const int64_t in_element = at_ % form_->element_bytes();
    return at_ / form_->element_bytes() * form_->stride + in_element / form_->row_bytes * form_->pitch + column();
  }
  // Bytes from here that lie side by side.
  int64_t run() const { return form_ ? form_->row_bytes - column() : INT64_MAX; }
  // How many times `bytes` bytes follow at one pitch, and that pitch. `bytes`: at most run().
  int64_t repeats(int64_t bytes, int64_t* pitch) const {
    *pitch = bytes;
    if (!form_) return INT64_MAX;
    if (bytes < form_->row_bytes) return run() / bytes;
    *pitch = form_->rows == 1 ? form_->stride : form_->pitch;
    return form_->even() ? INT64_MAX : form_->rows - at_ % form_->element_bytes() / form_->row_bytes;
  }

 private:
  int64_t column() const { return at_ % form_->row_bytes; }

  const std::optional<Strided>& form_;
  int64_t at_;
};

}  // namespace

std::optional<Strided> strided_form(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                                    int64_t itemsize, std::string* why) {
  const auto none = [&](const char* text) {
    if (why) *why = text;
    return std::nullopt;
  };
  if (sizes.empty()) return none("no dim 0");
  const std::vector<Dim> dims = joined(sizes, strides);
  const bool dense = dims.empty() || dims.back().stride == 1;  // else a row is one element of the tensor
  Strided form;
  form.stride = strides[0] * itemsize;
  form.row_bytes = (dense && !dims.empty() ? dims.back().size : 1) * itemsize;
  form.pitch = form.row_bytes;
  const size_t outer = dims.size() - (dense && !dims.empty() ? 1 : 0);
  if (outer > 1) return none("not rows at one pitch");
  if (outer == 1) {
    form.rows = dims[0].size;
    form.pitch = dims[0].stride * itemsize;
  }
  if (form.pitch < form.row_bytes) return none("rows overlap");
  return form;
}

bool disjoint(const Strided& form, int64_t elements) {
  if (elements <= 1) return true;
  const int64_t reach = (form.rows - 1) * form.pitch + form.row_bytes;
  // One behind the other, or side by side between the rows of the first.
  return form.stride >= reach ||
         (form.stride >= form.row_bytes && (elements - 1) * form.stride + form.row_bytes <= form.pitch);
}

std::string not_worth_it(const Strided& form, int64_t elements, int world, const StridedLimits& limits) {
  if (form.row_bytes < limits.row_bytes) return "rows of " + bytes(form.row_bytes);
  if (form.pitch >= limits.pitch || (form.rows == 1 && form.stride >= limits.pitch)) {
    return bytes(std::max(form.pitch, form.stride)) + " from row to row";
  }
  // No copy takes rows that come closer than they are long.
  if (form.rows == 1 && elements > 1 && form.stride < form.row_bytes) return "rows overlap";
  if (!form.even() && elements > world * limits.blocks && form.element_bytes() < limits.block_bytes) {
    return std::to_string(elements) + " blocks of " + bytes(form.element_bytes());
  }
  return "";
}

std::string do_not_fit(const std::optional<Strided>& from, const std::optional<Strided>& to,
                       const StridedLimits& limits) {
  if (!from || !to || from->row_bytes == to->row_bytes) return "";
  const auto [least, most] = std::minmax(from->row_bytes, to->row_bytes);
  if (most % least == 0 && most >= limits.block_bytes) return "";
  return "rows of " + bytes(from->row_bytes) + " into rows of " + std::to_string(to->row_bytes);
}

std::vector<RowsAt> copies(const std::optional<Strided>& from, int64_t from_at, const std::optional<Strided>& to,
                           int64_t to_at, int64_t bytes) {
  std::vector<RowsAt> result;
  Walk source(from, from_at), target(to, to_at);
  while (bytes > 0) {
    RowsAt one;
    one.to = target.offset();
    one.from = source.offset();
    Rows& rows = one.rows;
    rows.bytes = std::min({source.run(), target.run(), bytes});
    rows.rows = std::min(
        {source.repeats(rows.bytes, &rows.from_pitch), target.repeats(rows.bytes, &rows.to_pitch), bytes / rows.bytes});
    if (rows.rows == 1) rows.to_pitch = rows.from_pitch = rows.bytes;
    const int64_t moved = rows.rows * rows.bytes;
    source.advance(moved);
    target.advance(moved);
    bytes -= moved;
    result.push_back(one);
  }
  return result;
}

}  // namespace tide
