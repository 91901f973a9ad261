// Paged causal attention for CPUs: flash attention over KV slots that are found through req_to_token.
//
// The work is cut into items (sequence, query block, KV heads, KV range) that threads take from a counter. An item
// walks its KV range in blocks of BLOCK tokens with an online softmax. Blocks and splits sit at absolute multiples
// of KV indices and depend on nothing but the sequence itself, so a row's result is bitwise the same whatever else is
// in the batch, on any number of threads; and the same, to rounding, however its prompt was cut into chunks.
//
// Ways to compute a block:
//   direct  one query token: all query heads of a KV head against each K and V row where it lies in the pool
//   tiled   several: K is transposed and V copied into per-thread panels, then register-blocked products
// products.h has the pieces of both, and pairs.h those for processors that multiply pairs of bfloat16.
// A KV row is read only if some query of the item may see it, and a value enters only sums of queries that may see it
// (never as 0 * value), so NaN in freed slots, later tokens or padding cannot spread.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "../share.h"
#include "arguments.h"
#include "pairs.h"
#include "products.h"

namespace {

constexpr int64_t SPLIT = 256;   // KV tokens per item when one query block walks a long context; a multiple of BLOCK
#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t ROWS = 96;     // target rows (query tokens x query heads per KV head) of a query block
#else
constexpr int64_t ROWS = 48;
#endif
constexpr int64_t DIRECT_ROWS = 8;
constexpr int64_t VALUES = 16;   // V rows per pass over the output's columns
constexpr int64_t PAIR_VALUES = 32;  // and in pairs

struct Item {
  int64_t b, q0, qn;    // sequence, first query token in it, how many
  int64_t h0, h1;       // KV heads
  int64_t j0, j1;       // KV indices
  int64_t part;         // where its partial result goes for head 0; -1: the item is the whole row
  int64_t part_stride;  // from one head's partial result to the next head's
};

struct Merge {          // one sequence whose KV range was split
  int64_t b, qn, num_parts, part;
};

template <class A>
struct Scratch {
  std::vector<A> memory;
  A *q, *s, *o, *m, *l, *kt, *vt;

  Scratch from_row(int64_t r, int64_t Dp, int64_t Dvp) const {
    return {{}, q + r * Dp, s + r * BLOCK, o + r * Dvp, m + r, l + r, kt, vt};
  }

  void reserve(int64_t M, int64_t D, int64_t Dp, int64_t Dvp) {
    const int64_t sizes[] = {M * Dp, M * BLOCK, M * Dvp, M, M, BLOCK * D, BLOCK * Dvp};
    A** fields[] = {&q, &s, &o, &m, &l, &kt, &vt};
    int64_t total = 16;
    for (int64_t n : sizes) total += ceil_div(n, 16) * 16;
    if (static_cast<int64_t>(memory.size()) < total) memory.resize(total);
    auto address = reinterpret_cast<uintptr_t>(memory.data());
    A* next = reinterpret_cast<A*>((address + 63) / 64 * 64);
    for (int i = 0; i < 7; ++i) {
      *fields[i] = next;
      next += ceil_div(sizes[i], 16) * 16;
    }
  }
};

template <class A>
struct Plan {           // kept from call to call, as making it anew takes a while
  std::vector<Item> items;
  std::vector<Merge> merges;
  std::vector<A> parts;
};

template <class A, class T>
struct Attention {
  using Vec = Vectorized<A>;
  static constexpr int64_t VL = Vec::size(), PW = TILE_N * VL;
  static constexpr A NEG_INF = -std::numeric_limits<A>::infinity();

  const Args& x;
  const int64_t G = x.H / x.K;
  const int64_t D = x.D, Dp = ceil_div(D, PW) * PW;
  const int64_t Dv = x.Dv, Dvp = ceil_div(Dv, PW) * PW;
  const int64_t block_queries = std::max<int64_t>(1, ROWS / G);
  Plan<A>& planned = plan_of_thread();
  std::vector<Item>& items = planned.items;
  std::vector<Merge>& merges = planned.merges;
  std::vector<A>& parts = planned.parts;

  int64_t extend_len(int64_t b) const { return x.query_start_loc[b + 1] - x.query_start_loc[b]; }
  int64_t last_key(int64_t b, int64_t i) const { return x.seq_lens[b] - extend_len(b) + i + 1; }  // exclusive
  int64_t first_key(int64_t b, int64_t i) const { return first_visible(x, last_key(b, i) - 1); }

  static Plan<A>& plan_of_thread() {
    static thread_local Plan<A> one;
    one.items.clear(), one.merges.clear();
    return one;
  }

  void plan() {
    const int64_t threads = at::get_num_threads();
    int64_t ranges = 0;
    for (int64_t b = 0; b < x.B; ++b)
      if (extend_len(b) == 1) ranges += ceil_div(x.seq_lens[b] - first_key(b, 0), SPLIT);
    // A slot's heads lie side by side: reading them in one item is kinder to the memory, when items abound.
    const int64_t heads = ranges >= 4 * threads ? x.K : 1;
    int64_t num_parts = 0;
    double work = 0;
    for (int64_t b = 0; b < x.B; ++b) {
      const int64_t n = extend_len(b);
      // Backwards: late queries see the longest context, and long items must not come last.
      for (int64_t blk = ceil_div(n, block_queries) - 1; blk >= 0; --blk) {
        const int64_t q0 = blk * block_queries, qn = std::min(block_queries, n - q0);
        const int64_t lo = first_key(b, q0), hi = last_key(b, q0 + qn - 1);
        const int64_t first = lo / SPLIT, count = n <= block_queries ? ceil_div(hi, SPLIT) - first : 1;
        work += static_cast<double>(qn) * static_cast<double>(x.H * (D + Dv) / 2 * (hi - lo));
        if (count > 1) merges.push_back({b, qn, count, num_parts});
        const int64_t step = n == 1 ? heads : 1;
        for (int64_t h = 0; h < x.K; h += step) {
          if (count == 1) {
            items.push_back({b, q0, qn, h, h + step, lo, hi, -1, 0});
            continue;
          }
          for (int64_t c = 0; c < count; ++c)
            items.push_back({b, q0, qn, h, h + step, std::max(lo, (first + c) * SPLIT),
                             std::min(hi, (first + c + 1) * SPLIT), num_parts + c * qn * G, count * qn * G});
        }
        if (count > 1) num_parts += x.K * count * qn * G;
      }
    }
    const size_t numbers = num_parts * (Dv + 2);
    if (parts.size() < numbers) parts.resize(numbers);
    serial = work < 100000;  // about what waking the other threads costs
  }
  bool serial = false;

  template <class F>
  void for_each(int64_t n, const F& f) const {
    share(n, serial ? n : 1, {}, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) f(i);
    });
  }

  void run() {
    plan();
    for_each(static_cast<int64_t>(items.size()), [&](int64_t i) {
      const Item& item = items[i];
      if (is_direct(item)) {
        const bool more = i + 1 < static_cast<int64_t>(items.size()) && is_direct(items[i + 1]);
        return attend_direct(item, more ? &items[i + 1] : nullptr);
      }
      for (int64_t h = item.h0; h < item.h1; ++h) attend_tiled(item, h);
    });
    int64_t rows = 0;
    for (const Merge& job : merges) rows += job.qn * x.H * job.num_parts;
    serial = serial || rows * Dv < 50000;
    for_each(static_cast<int64_t>(merges.size()) * x.K, [&](int64_t i) { merge(merges[i / x.K], i % x.K); });
  }

  Scratch<A>& scratch(int64_t M) const {
    static thread_local Scratch<A> s;
    s.reserve(M, D, Dp, Dvp);
    return s;
  }

  static constexpr bool PAIRS = std::is_same_v<A, float> && std::is_same_v<T, BFloat16>;

  // Whether queries and keys are multiplied as they are.
  bool in_pairs() const {
#ifdef PAIRS_IN_HARDWARE
    return PAIRS && x.q_dtype == kBFloat16;
#else
    return false;
#endif
  }

  bool is_direct(const Item& item) const {
    return item.qn == 1 && G <= DIRECT_ROWS && D % VL == 0 && Dv % VL == 0;
  }

  const int32_t* slots_of(const Item& it) const { return x.req_to_token + x.req_pool_indices[it.b] * x.req_stride; }

  // Rows that have seen nothing yet.
  void begin(const Scratch<A>& w, int64_t M) const {
    std::fill_n(w.o, M * Dvp, A(0));
    std::fill_n(w.m, M, NEG_INF);
    std::fill_n(w.l, M, A(0));
  }

  // One head's keys and values of a block of the pool, of the tokens in columns [c0, c1).
  struct Rows {
    const T *k[BLOCK], *v[BLOCK];
  };

  void find_rows(const int32_t* slots, int64_t h, int64_t c0, int64_t c1, Rows& rows) const {
    const T* k = reinterpret_cast<const T*>(x.pool_k) + h * x.pool_stride_h;
    const T* v = reinterpret_cast<const T*>(x.pool_v) + h * x.pool_stride_h;
    for (int64_t c = c0; c < c1; ++c) {
      rows.k[c] = k + slots[c] * x.pool_stride_s;
      rows.v[c] = v + slots[c] * x.pool_stride_s;
    }
  }

  // The direct items walk their blocks with all their heads at once, as a slot's heads lie side by side. While a block
  // is computed, the memory is asked for the next one, of this item or of the item that comes next: a little at a time,
  // and into the second cache, as the first one has no room for a block.
  void attend_direct(const Item& it, const Item* after) const {
    const int64_t heads = it.h1 - it.h0, M = G;
    Scratch<A>& all = scratch(heads * M);
    begin(all, heads * M);
    const int32_t* slots = slots_of(it);
    Rows first;  // of the first head
    const T* rows[BLOCK];
    const bool pairs = in_pairs() && D % 32 == 0 && Dv % 32 == 0;
    const int64_t dots = pairs ? 8 : 4;  // of so many keys at a time
    if (!pairs)
      for (int64_t h = 0; h < heads; ++h) load_queries(it, it.h0 + h, all.q + h * M * Dp);
#ifdef PAIRS_IN_HARDWARE
    static thread_local PairScratch of;
    if (pairs) {
      of.reserve(heads * M, BLOCK, 0, 0);
      std::fill_n(all.kt, ceil_div(Dv, 2), A(0));  // as a row of the pool, all zeros
    }
#endif
    const T* const all_k = reinterpret_cast<const T*>(x.pool_k);
    const T* const all_v = reinterpret_cast<const T*>(x.pool_v);
    for (int64_t j0 = it.j0 / BLOCK * BLOCK; j0 < it.j1; j0 += BLOCK) {
      const int64_t c0 = std::max(it.j0 - j0, int64_t(0)), c1 = std::min(it.j1 - j0, BLOCK);
      const bool here = j0 + BLOCK < it.j1;
      const Item* next = here ? &it : after;
      const int64_t next_j = here ? j0 + BLOCK : next ? next->j0 : 0;
      const int64_t next_count = next ? std::min(BLOCK, next->j1 - next_j) : 0;
      const int32_t* next_slots = next ? slots_of(*next) + next_j : nullptr;
      const auto ask = [&](const T* of, int64_t c, int64_t count, int64_t h, int64_t width) {
        const T* head = of + (next ? next->h0 + h : 0) * x.pool_stride_h;
        for (int64_t i = c; i < std::min(c + count, next_count); ++i)
          prefetch_row(head + next_slots[i] * x.pool_stride_s, width);
      };
      find_rows(slots + j0, it.h0, c0, c1, first);
      // The columns that fill up a group of dots repeat a row in range, and are masked below.
      for (int64_t c = c0 / dots * dots; c < c0; ++c) first.k[c] = first.k[c0];
      for (int64_t c = c1; c < ceil_div(c1, dots) * dots; ++c) first.k[c] = first.k[c1 - 1];
      for (int64_t c = c0 / dots * dots; c < c1; c += dots) {
        for (int64_t h = 0; h < heads; ++h) {
          ask(all_k, c, dots, h, D);
          for (int64_t i = 0; i < dots; ++i) rows[i] = first.k[c + i] + h * x.pool_stride_h;
#ifdef PAIRS_IN_HARDWARE
          if constexpr (PAIRS)
            if (pairs) {
              dot_rows_in_pairs(M, query<BFloat16>(it.b, it.q0, (it.h0 + h) * G), x.q_stride_h, rows, D,
                                all.s + h * M * BLOCK + c, BLOCK);
              continue;
            }
#endif
          const A* q = all.q + h * M * Dp;
          A* s = all.s + h * M * BLOCK + c;
          int64_t m = 0;
          for (; M - m >= 3 && M - m != 4; m += 3) dot_rows<A, T, 3>(q + m * Dp, Dp, rows, D, s + m * BLOCK, BLOCK);
          for (; M - m >= 2; m += 2) dot_rows<A, T, 2>(q + m * Dp, Dp, rows, D, s + m * BLOCK, BLOCK);
          if (m < M) dot_rows<A, T, 1>(q + m * Dp, Dp, rows, D, s + m * BLOCK, BLOCK);
        }
      }
      const int64_t shift = j0 - last_key(it.b, it.q0) + 1;
#ifdef PAIRS_IN_HARDWARE
      if constexpr (PAIRS)
        if (pairs) {
          const T* const zeros = reinterpret_cast<const T*>(all.kt);
          const Sight sight{c0, c1, shift};
          weights_in_pairs(all, &sight, 1, heads * M, it.h0 * G, of);
          for (int64_t c = c0 / 2 * 2; c < c1; c += PAIR_VALUES) {
            const int64_t count = std::min(PAIR_VALUES, ceil_div(c1, 2) * 2 - c);
            for (int64_t h = 0; h < heads; ++h) {
              ask(all_v, c, PAIR_VALUES, h, Dv);
              for (int64_t i = 0; i < count; ++i)
                rows[i] = c + i < c0 || c + i >= c1 ? zeros : first.v[c + i] + h * x.pool_stride_h;
              weigh_rows_in_pairs(M, of.weights + h * M * BLOCK / 2 + c / 2, BLOCK / 2, rows, count, Dv,
                                  all.o + h * M * Dvp, Dvp);
            }
          }
          continue;
        }
#endif
      for (int64_t r = 0; r < heads * M; ++r) softmax_step(all, r, it.h0 * G + r, shift, c0, c1);
      for (int64_t c = c0; c < c1; c += VALUES) {
        const int64_t count = std::min(VALUES, c1 - c);
        for (int64_t h = 0; h < heads; ++h) {
          ask(all_v, c, VALUES, h, Dv);
          for (int64_t i = 0; i < count; ++i) rows[i] = first.v[c + i] + h * x.pool_stride_h;
          weigh_direct(all.from_row(h * M, Dp, Dvp), M, rows, c, count);
        }
      }
    }
    if (pairs) scale_largest(all, heads * M);
    for (int64_t h = 0; h < heads; ++h) deliver(it, it.h0 + h, all.from_row(h * M, Dp, Dvp));
  }

  // ---- weights in pairs ----

  // Whether pair_softmax serves, which scales distances between logits, and no logit.
  bool scales_distances() const { return x.softcap <= 0 && !x.slopes && x.scale * x.k_scale > 0; }

  void scale_largest(const Scratch<A>& w, int64_t M) const {
    if (scales_distances())
      for (int64_t m = 0; m < M; ++m) w.m[m] *= static_cast<A>(x.scale * x.k_scale);
  }

#ifdef PAIRS_IN_HARDWARE
  // What a query token sees of a block: columns [from, to). The key in column 0 is `shift` positions after it.
  struct Sight {
    int64_t from, to, shift;
  };

  // The scores of a block become weights. For each query token there are `group` rows, of heads from `head` on.
  void weights_in_pairs(const Scratch<A>& w, const Sight* sights, int64_t queries, int64_t group, int64_t head,
                        const PairScratch& of) const {
    const int64_t M = queries * group;
    if (!scales_distances()) {
      for (int64_t m = 0; m < M; ++m) {
        const auto [from, to, shift] = sights[m / group];
        softmax_step(w, m, head + m % group, shift, from, to, of.weights + m * BLOCK / 2);
      }
      return;
    }
    const auto scale = static_cast<float>(x.scale * x.k_scale * 1.44269504088896341);
    uint64_t seen[16];
    for (int64_t i = 0, m = 0; i < queries; ++i) {
      const int64_t count = sights[i].to - sights[i].from;
      const uint64_t columns = count == 64 ? ~uint64_t(0) : ((uint64_t(1) << count) - 1) << (sights[i].from & 63);
      for (int64_t g = 0; g < group; ++g) {
        seen[m++ % 16] = columns;
        if (m % 16 && m < M) continue;
        const int64_t r = (m - 1) / 16 * 16;
        pair_softmax(m - r, w.s + r * BLOCK, seen, scale, of.weights + r * BLOCK / 2, w.m + r, w.l + r, w.o + r * Dvp, Dvp);
      }
    }
  }

  void attend_pairs(const Item& it, int64_t h) const {
    const int64_t M = it.qn * G, key_pairs = ceil_div(D, 2);
    Scratch<A>& w = scratch(M);
    static thread_local PairScratch of;
    of.reserve(M, BLOCK, key_pairs, Dvp);
    Sight sights[ROWS];
    for (int64_t r = 0; r < M; ++r)
      pack_query(query<BFloat16>(it.b, it.q0 + r / G, h * G + r % G), D, of.q + r * key_pairs);
    begin(w, M);
    const int32_t* slots = slots_of(it);
    Rows rows;
    for (int64_t j0 = it.j0 / BLOCK * BLOCK; j0 < it.j1; j0 += BLOCK) {
      const int64_t c0 = std::max(it.j0 - j0, int64_t(0)), c1 = std::min(it.j1 - j0, BLOCK);
      find_rows(slots + j0, h, c0, c1, rows);
      pack_column_pairs(rows.k, c0, c1, D, of.keys);
      const bool finite = pack_row_pairs(rows.v, c0, c1, Dv, BLOCK / 2, of.values);
      const int64_t from = c0 / PAIR_COLUMNS * PAIR_COLUMNS, to = ceil_div(c1, PAIR_COLUMNS) * PAIR_COLUMNS;
      pair_product<false>(M, to - from, of.q, key_pairs, of.keys + from * key_pairs, key_pairs, w.s + from, BLOCK, key_pairs);
      static_assert(BLOCK == 64);
      const auto weigh = [&](int64_t m, int64_t count, int64_t a, int64_t z) {
        pair_product<true>(count, Dvp, of.weights + m * BLOCK / 2 + a / 2, BLOCK / 2, of.values + a / 2 * PAIR_COLUMNS, BLOCK / 2,
                     w.o + m * Dvp, Dvp, ceil_div(z, 2) - a / 2);
      };
      // On the diagonal and at a window's edge each query token has a range of its own.
      for (int64_t i = 0; i < it.qn; ++i) {
        const int64_t last = last_key(it.b, it.q0 + i), from = std::clamp(first_key(it.b, it.q0 + i) - j0, c0, c1);
        sights[i] = {from, std::clamp(last - j0, from, c1), j0 - last + 1};
      }
      weights_in_pairs(w, sights, it.qn, G, h * G, of);
      if (!finite)
        for (int64_t i = 0; i < it.qn; ++i) {
          pack_row_pairs(rows.v, sights[i].from, sights[i].to, Dv, BLOCK / 2, of.values);
          weigh(i * G, G, sights[i].from, sights[i].to);
        }
      // Weights are zero where a query does not see a value, which is a number then.
      if (finite) weigh(0, M, c0, c1);
    }
    scale_largest(w, M);
    deliver(it, h, w);
  }
#endif

  void attend_tiled(const Item& it, int64_t h) const {
#ifdef PAIRS_IN_HARDWARE
    if constexpr (PAIRS)
      if (in_pairs()) return attend_pairs(it, h);
#endif
    const int64_t M = it.qn * G;
    Scratch<A>& w = scratch(M);
    load_queries(it, h, w.q);
    begin(w, M);
    const int32_t* slots = slots_of(it);
    Rows rows;
    for (int64_t j0 = it.j0 / BLOCK * BLOCK; j0 < it.j1; j0 += BLOCK) {
      const int64_t c0 = std::max(it.j0 - j0, int64_t(0)), c1 = std::min(it.j1 - j0, BLOCK);
      find_rows(slots + j0, h, c0, c1, rows);
      pack_keys(rows.k, c0, c1, D, w.kt);
      pack_values(rows.v, c0, c1, Dv, w.vt);
      std::fill_n(w.s, M * BLOCK, A(0));
      product(M, BLOCK, w.q, Dp, w.kt, D, w.s, BLOCK, D);
      const bool whole = first_key(it.b, it.q0 + it.qn - 1) <= j0 + c0 && last_key(it.b, it.q0) >= j0 + c1;
      if (whole) {
        for (int64_t m = 0; m < M; ++m)
          softmax_step(w, m, h * G + m % G, j0 - last_key(it.b, it.q0 + m / G) + 1, c0, c1);
        product(M, Dvp, w.s + c0, BLOCK, w.vt + c0 * PW, BLOCK, w.o, Dvp, c1 - c0);
        continue;
      }
      // On the diagonal and at a window's edge each query token has a range of its own; its G rows share it.
      for (int64_t i = 0; i < it.qn; ++i) {
        const int64_t a = std::max(c0, first_key(it.b, it.q0 + i) - j0);
        const int64_t z = std::min(c1, last_key(it.b, it.q0 + i) - j0);
        if (a >= z) continue;
        const int64_t shift = j0 - last_key(it.b, it.q0 + i) + 1;
        for (int64_t m = i * G; m < (i + 1) * G; ++m) softmax_step(w, m, h * G + m % G, shift, a, z);
        product(G, Dvp, w.s + i * G * BLOCK + a, BLOCK, w.vt + a * PW, BLOCK, w.o + i * G * Dvp, Dvp, z - a);
      }
    }
    deliver(it, h, w);
  }

  // Rows of one KV head, to the output or, unnormalized, to the item's place among the partial results
  void deliver(const Item& it, int64_t h, const Scratch<A>& w) const {
    const int64_t M = it.qn * G;
    if (it.part < 0) {
      for (int64_t r = 0; r < M; ++r) finish(it.b, it.q0 + r / G, h * G + r % G, w.o + r * Dvp, w.m[r], w.l[r]);
      return;
    }
    A* part = parts.data() + (it.part + (h * it.part_stride)) * (Dv + 2);
    for (int64_t r = 0; r < M; ++r, part += Dv + 2) {
      part[0] = w.m[r];
      part[1] = w.l[r];
      std::copy_n(w.o + r * Dvp, Dv, part + 2);
    }
  }

  template <class Q>
  const Q* query(int64_t b, int64_t i, int64_t head) const {
    return static_cast<const Q*>(x.q) + (x.query_start_loc[b] + i) * x.q_stride_t + head * x.q_stride_h;
  }

  void load_queries(const Item& it, int64_t h, A* q) const {
    const A scale = static_cast<A>(x.scale * x.k_scale);
    with_dtype(x.q_dtype, [&](auto tag) {
      using Q = decltype(tag);
      for (int64_t r = 0; r < it.qn * G; ++r) {
        const Q* row = query<Q>(it.b, it.q0 + r / G, h * G + r % G);
        for (int64_t d = 0; d < D; ++d) q[r * Dp + d] = static_cast<A>(row[d]) * scale;
        std::fill(q + r * Dp + D, q + (r + 1) * Dp, A(0));
      }
    });
  }

  // One number of a query head, of a tensor [H].
  static A per_head(const void* values, int64_t dtype, int64_t head) {
    A out{};
    with_dtype(dtype, [&](auto tag) { out = static_cast<A>(static_cast<const decltype(tag)*>(values)[head]); });
    return out;
  }

  // Logits of one row in columns c0..c1 become weights (0 elsewhere); m, l and o move to the new maximum.
  // Column c holds the key `shift + c` positions after the row's query (never a later one, so at most 0).
  // With `pairs`, logits are still to be scaled, and weights are rounded to bfloat16, there as well.
  void softmax_step(const Scratch<A>& w, int64_t row, int64_t head, int64_t shift, int64_t c0, int64_t c1,
                    [[maybe_unused]] uint32_t* pairs = nullptr) const {
    A* s = w.s + row * BLOCK;
    if (pairs) {
      const Vec scale(static_cast<A>(x.scale * x.k_scale));
      for (int64_t c = c0 / VL * VL; c < c1; c += VL) (Vec::loadu(s + c) * scale).store(s + c);
    }
    if (x.softcap > 0) {
      const Vec cap(static_cast<A>(x.softcap)), inverse(static_cast<A>(1 / x.softcap));
      for (int64_t c = c0 / VL * VL; c < c1; c += VL) (cap * (Vec::loadu(s + c) * inverse).tanh()).store(s + c);
    }
    if (x.slopes) {
      const A slope = per_head(x.slopes, x.slopes_dtype, head);
      for (int64_t c = c0; c < c1; ++c) s[c] += slope * static_cast<A>(shift + c);
    }
    std::fill(s, s + c0, NEG_INF);
    std::fill(s + c1, s + BLOCK, NEG_INF);
    Vec top = Vec::loadu(s);
    for (int64_t c = VL; c < BLOCK; c += VL) top = at::vec::maximum(top, Vec::loadu(s + c));  // keeps NaN
    const A block_max = at::vec::vec_reduce_all<A>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, top);
    const A old_max = w.m[row];
    const A new_max = block_max > old_max || std::isnan(block_max) ? block_max : old_max;
    if (new_max == NEG_INF) {  // every logit so far is -inf: weight 0, and no -inf - -inf
      std::fill_n(s, BLOCK, A(0));
      if (pairs) std::fill_n(pairs, BLOCK / 2, 0);
      return;
    }
    if (new_max != old_max) {
      const A shrink = std::exp(old_max - new_max);
      w.m[row] = new_max;
      w.l[row] *= shrink;
      A* o = w.o + row * Dvp;
      for (int64_t d = 0; d < Dvp; ++d) o[d] *= shrink;
    }
    const Vec minus(new_max);
    Vec total(A(0));
    for (int64_t c = 0; c < BLOCK; c += VL) {
      const Vec p = exp_nonpositive<A>(Vec::loadu(s + c) - minus);
      p.store(s + c);
      total = total + p;
    }
#ifdef PAIRS_IN_HARDWARE
    if constexpr (PAIRS)
      if (pairs) {
        round_weights(s, pairs, BLOCK);
        total = Vec(A(0));
        for (int64_t c = 0; c < BLOCK; c += VL) total = total + Vec::loadu(s + c);
      }
#endif
    w.l[row] += sum(total);
  }

  void weigh_direct(const Scratch<A>& w, int64_t M, const T* const* rows, int64_t c0, int64_t count) const {
    int64_t m = 0;
    for (; m + 4 <= M; m += 4) weigh_rows<A, T, 4>(w.s + m * BLOCK + c0, BLOCK, rows, count, Dv, w.o + m * Dvp, Dvp);
    const A* s = w.s + m * BLOCK + c0;
    A* o = w.o + m * Dvp;
    if (M - m == 3) weigh_rows<A, T, 3>(s, BLOCK, rows, count, Dv, o, Dvp);
    if (M - m == 2) weigh_rows<A, T, 2>(s, BLOCK, rows, count, Dv, o, Dvp);
    if (M - m == 1) weigh_rows<A, T, 1>(s, BLOCK, rows, count, Dv, o, Dvp);
  }

  void merge(const Merge& job, int64_t h) const {
    const int64_t M = job.qn * G, stride = M * (Dv + 2);
    Scratch<A>& w = scratch(1);
    for (int64_t r = 0; r < M; ++r) {
      const A* first = parts.data() + (job.part + h * job.num_parts * M + r) * (Dv + 2);
      A top = NEG_INF, total = 0;
      for (int64_t c = 0; c < job.num_parts; ++c)
        if (first[c * stride] > top || std::isnan(first[c * stride])) top = first[c * stride];
      std::fill_n(w.o, Dv, A(0));
      for (int64_t c = 0; c < job.num_parts; ++c) {
        const A* part = first + c * stride;
        if (part[0] == NEG_INF) continue;  // no key of this part is visible to this row
        const A shrink = std::exp(part[0] - top);
        total += shrink * part[1];
        for (int64_t d = 0; d < Dv; ++d) w.o[d] += shrink * part[2 + d];
      }
      finish(job.b, r / G, h * G + r % G, w.o, top, total);
    }
  }

  void finish(int64_t b, int64_t i, int64_t head, const A* o, A max, A total) const {
    A factor;
    if (x.sinks) {
      const A sink = per_head(x.sinks, x.sinks_dtype, head);
      // Relative to the larger of the two, so that neither exponential overflows.
      const A top = sink > max ? sink : max;
      factor = std::exp(max - top) / (total * std::exp(max - top) + std::exp(sink - top));
    } else {
      factor = A(1) / total;
    }
    factor *= static_cast<A>(x.v_scale);
    const int64_t offset = ((x.query_start_loc[b] + i) * x.H + head) * Dv;
    with_dtype(x.q_dtype, [&](auto tag) {
      using Q = decltype(tag);
      Q* out = static_cast<Q*>(x.out) + offset;
      for (int64_t d = 0; d < Dv; ++d) out[d] = static_cast<Q>(o[d] * factor);
    });
  }
};

}  // namespace
