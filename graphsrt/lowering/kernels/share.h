// Work of a kernel that threads divide among each other: `share`. In a captured step they are a team (team/team.cpp):
// they wait for the next kernel's work instead of being called together for each kernel, and meanwhile read what it
// will read. Elsewhere they are ATen's.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "team.h"

namespace {

struct alignas(64) Cursor {
  std::atomic<int64_t> at;
};

// f(begin, end) for pieces of 0..n. Each thread goes through a range of its own, and takes from the others' when it is
// done with it. `piece`: the length of pieces. `read`: memory that is read in the order of the range, once, if that is
// most of the work. It is best read in long runs, so a piece then is half of what is left, but no less than `piece`.
template <class F>
void share(int64_t n, int64_t piece, const Stream& read, const F& f) {
  if (n <= 0) return;
  const int64_t team = graphsrt_team_size(), threads = team ? team : at::get_num_threads();
  const int64_t workers = std::min(threads, (n + piece - 1) / piece);
  if (workers <= 1) return f(int64_t(0), n);
  Cursor few[8];
  const std::unique_ptr<Cursor[]> more(workers > 8 ? new Cursor[workers] : nullptr);
  Cursor* const next = more ? more.get() : few;
  for (int64_t w = 0; w < workers; ++w) next[w].at.store(n * w / workers, std::memory_order_relaxed);
  const auto work = [&](int64_t mine) {
    for (int64_t v = 0; v < workers; ++v) {
      const int64_t whose = (mine + v) % workers, stop = n * (whose + 1) / workers;
      for (;;) {
        int64_t i = next[whose].at.load(std::memory_order_relaxed), end;
        do end = std::min(stop, i + std::max(piece, read.bytes ? (stop - i) / 2 : 0));
        while (i < stop && !next[whose].at.compare_exchange_weak(i, end, std::memory_order_relaxed));
        if (i >= stop) break;
        f(i, end);
      }
    }
  };
  if (!team) {
    at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) work(w);
    });
    return;
  }
  const auto member = [&](int64_t w) {
    if (w < workers) work(w);
  };
  using Member = decltype(member);
  graphsrt_team_run([](const void* of, int64_t w) { (*static_cast<const Member*>(of))(w); }, &member, read);
}

}  // namespace
