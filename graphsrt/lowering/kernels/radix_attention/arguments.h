// What attention is called with, and what of it must be read from data to be checked: cpu.py checks the rest, shapes,
// types and strides.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace {

using c10::BFloat16;
using c10::Half;

enum DType : int64_t { kFloat = 0, kDouble = 1, kBFloat16 = 2, kHalf = 3 };

struct Args {
  const void* q;                          // [T, H, D]
  int64_t q_dtype, q_stride_t, q_stride_h;
  const void* k;                          // [T, K, D], or null: nothing is written
  const void* v;                          // [T, K, Dv]
  int64_t kv_dtype, k_stride_t, k_stride_h, v_stride_t, v_stride_h;
  char* pool_k;                           // [S, K, D] of this layer
  char* pool_v;                           // [S, K, Dv], of the same strides
  int64_t pool_stride_s, pool_stride_h;
  const int32_t* req_to_token;            // [max_reqs, max_ctx]
  int64_t max_reqs, max_ctx, req_stride;
  const int64_t* req_pool_indices;        // [B]
  const int64_t* seq_lens;                // [B]
  const int64_t* query_start_loc;         // [B + 1]
  const int64_t* out_cache_loc;           // [T]
  const void* sinks;                      // [H] or null
  int64_t sinks_dtype;
  const void* slopes;                     // ALiBi, [H] or null
  int64_t slopes_dtype;
  void* out;                              // [T, H, Dv], contiguous, q_dtype
  int64_t T, H, K, D, Dv, B, S;
  int64_t window, chunk;                  // 0: none
  double scale, softcap;                  // softcap 0: none
  double k_scale, v_scale;                // the pool holds keys and values divided by these; 1 unless it is in FP8
};

// The first KV index that the token at `position` sees.
inline int64_t first_visible(const Args& x, int64_t position) {
  int64_t first = x.window ? std::max<int64_t>(0, position + 1 - x.window) : 0;
  if (x.chunk) first = std::max(first, position / x.chunk * x.chunk);
  return first;
}

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class F>
void with_dtype(int64_t dtype, F&& f) {
  switch (dtype) {
    case kFloat: return f(float{});
    case kDouble: return f(double{});
    case kBFloat16: return f(BFloat16{});
    default: return f(Half{});
  }
}

void check_batch(const Args& x) {
  if (x.query_start_loc[0] != 0) refuse("query_start_loc must start with 0");
  for (int64_t b = 0; b < x.B; ++b) {
    const std::string who = "sequence " + std::to_string(b) + ": ";
    const int64_t n = x.query_start_loc[b + 1] - x.query_start_loc[b], len = x.seq_lens[b];
    if (n < 0) refuse(who + "query_start_loc decreases");
    if (x.query_start_loc[b + 1] > x.T)
      refuse(who + "query_start_loc ends at " + std::to_string(x.query_start_loc[b + 1]) + ", past the " +
             std::to_string(x.T) + " rows of q");
    if (n == 0) continue;  // nothing is read for it
    if (len < n || len > x.max_ctx)
      refuse(who + "seq_lens is " + std::to_string(len) + ", expected " + std::to_string(n) +
             " (its new tokens) to " + std::to_string(x.max_ctx) + " (columns of req_to_token)");
    const int64_t req = x.req_pool_indices[b];
    if (req < 0 || req >= x.max_reqs)
      refuse(who + "req_pool_indices is " + std::to_string(req) + ", expected 0 to " +
             std::to_string(x.max_reqs - 1) + " (rows of req_to_token)");
    const int32_t* slots = x.req_to_token + req * x.req_stride;
    const int64_t begin = first_visible(x, len - n);
    int32_t low = 0, high = 0;
    for (int64_t j = begin; j < len; ++j) low = std::min(low, slots[j]), high = std::max(high, slots[j]);
    if (low < 0 || high >= x.S)
      refuse(who + "req_to_token holds slot " + std::to_string(low < 0 ? low : high) + ", expected 0 to " +
             std::to_string(x.S - 1) + " (slots of kv_pool)");
  }
}

void check_locations(const Args& x) {
  for (int64_t t = 0; t < x.T; ++t)
    if (x.out_cache_loc[t] < -1 || x.out_cache_loc[t] >= x.S)
      refuse("out_cache_loc[" + std::to_string(t) + "] is " + std::to_string(x.out_cache_loc[t]) +
             ", expected -1 (not written) to " + std::to_string(x.S - 1) + " (slots of kv_pool)");
}

}  // namespace
