// Tensors whose bytes lie in rows with gaps between them, seen from dim 0, by which an all-to-all is cut.
//
//   Ulysses: x[s, world * h, d].view(s, world, h, d).permute(1, 0, 2, 3): an element of dim 0 is what one rank gets, s
//   rows of h * d elements, and from one row to the next are world * h * d elements.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tide {

// How a tensor's bytes lie that is not contiguous. In bytes but for `rows`.
struct Strided {
  int64_t stride = 0;     // from one element of dim 0 to the next
  int64_t rows = 1;       // of one element
  int64_t row_bytes = 0;  // > 0
  int64_t pitch = 0;  // from one row of an element to the next, at least row_bytes; row_bytes where there is one row

  int64_t element_bytes() const { return rows * row_bytes; }
  // Elements go on where the last one's rows ended: a part of any number of them is one block of rows.
  bool even() const { return rows == 1 || stride == rows * pitch; }
  bool operator==(const Strided& other) const {
    return stride == other.stride && rows == other.rows && row_bytes == other.row_bytes && pitch == other.pitch;
  }
};

// The form of a tensor of these sizes and strides (in elements, none negative) with at least one element. Nothing where
// rows overlap or where an element of dim 0 is more than rows at one pitch; `why`, if given, then says so.
std::optional<Strided> strided_form(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                                    int64_t itemsize, std::string* why = nullptr);

// Whether no two of `elements` elements share a byte, as far as that is plain to see.
bool disjoint(const Strided& form, int64_t elements);

// What makes a strided copy worth its while beside one that makes the tensor contiguous first.
struct StridedLimits {
  int64_t row_bytes = 1;    // of a row, at least
  int64_t blocks = 1;       // of rows at one pitch, for each rank of the group; more of them have
  int64_t block_bytes = 0;  // at least so many bytes each
  int64_t pitch = INT64_MAX;
};

// Why a tensor of this form, `elements` long, is better made contiguous for a call of `world` ranks; "" when it is not.
std::string not_worth_it(const Strided& form, int64_t elements, int world, const StridedLimits& limits);
// The same for what lies in rows like `from` and goes into rows like `to`; none: contiguous.
std::string do_not_fit(const std::optional<Strided>& from, const std::optional<Strided>& to,
                       const StridedLimits& limits);

// Rows of one copy: `rows` times `bytes` bytes. Pitches as in Strided, of either end.
struct Rows {
  int64_t rows = 1;
  int64_t bytes = 0;
  int64_t to_pitch = 0, from_pitch = 0;

  int64_t to_reach() const { return (rows - 1) * to_pitch + bytes; }
  int64_t from_reach() const { return (rows - 1) * from_pitch + bytes; }
};

struct RowsAt {
  int64_t to = 0, from = 0;  // byte offsets
  Rows rows;
};

// The copies that move `bytes` bytes, beginning at byte `from_at` of what has the form `from`, counted without its
// gaps, to byte `to_at` of what has the form `to`. In order, each as large as the forms allow.
std::vector<RowsAt> copies(const std::optional<Strided>& from, int64_t from_at, const std::optional<Strided>& to,
                           int64_t to_at, int64_t bytes);

}  // namespace tide
