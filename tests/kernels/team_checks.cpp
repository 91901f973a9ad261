// What test_team.py asks of a team of threads: C functions, for ctypes.
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "share.h"

namespace {

struct Work {
  int64_t jobs, n, piece, failing;  // `failing`: the index at which a job fails, or -1
  Stream read;
  std::vector<std::vector<std::atomic<int32_t>>> seen;
  int64_t failures = 0;

  void run() {
    for (int64_t job = 0; job < jobs; ++job) {
      try {
        share(n, piece, read, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++seen[job][i];
          if (begin <= failing && failing < end) throw std::runtime_error("piece of " + std::to_string(failing));
        });
      } catch (const std::runtime_error& e) {
        failures += e.what() == "piece of " + std::to_string(failing);
      }
    }
  }
};

}  // namespace

extern "C" {

// Each of `jobs` jobs meets 0..n; the number of (job, index) that were not met just once. `failures`: what was thrown.
int64_t wrongly_met(int64_t threads, int64_t jobs, int64_t n, int64_t piece, const void* read, int64_t bytes,
                    int64_t failing, int64_t* failures) {
  Work work{jobs, n, piece, failing, {read, bytes}, {}};
  for (int64_t job = 0; job < jobs; ++job) work.seen.emplace_back(n);
  GraphsrtJobs* of = graphsrt_new_jobs();
  graphsrt_team_lead(threads, of, [](void* work) { static_cast<Work*>(work)->run(); }, &work);
  graphsrt_delete_jobs(of);
  int64_t wrong = 0;
  for (const auto& job : work.seen)
    for (const auto& count : job) wrong += count != 1;
  *failures = work.failures;
  return wrong;
}

// Steps of one job that reads this memory, which `stays` or not. The leader idles before it.
void repeat(int64_t threads, int64_t steps, const void* read, int64_t bytes, bool stays) {
  GraphsrtJobs* of = graphsrt_new_jobs();
  if (stays) graphsrt_jobs_stay(of, {read, bytes});
  Stream given{read, bytes};
  for (int64_t i = 0; i < steps; ++i)
    graphsrt_team_lead(threads, of, [](void* of) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      share(100, 1, *static_cast<Stream*>(of), [](int64_t, int64_t) {});
    }, &given);
  graphsrt_delete_jobs(of);
}

// Whether an error of the step itself, between jobs, comes out, and a team can be led again. One thread is no team.
bool error_comes_out(int64_t threads) {
  GraphsrtJobs* of = graphsrt_new_jobs();
  bool thrown = false;
  try {
    graphsrt_team_lead(threads, of, [](void*) { throw std::runtime_error("of the step"); }, nullptr);
  } catch (const std::runtime_error& e) {
    thrown = e.what() == std::string("of the step");
  }
  int64_t size = 0;
  graphsrt_team_lead(threads, of, [](void* size) { *static_cast<int64_t*>(size) = graphsrt_team_size(); }, &size);
  graphsrt_delete_jobs(of);
  return thrown && size == (threads > 1 ? threads : 0) && graphsrt_team_size() == 0;
}
}
