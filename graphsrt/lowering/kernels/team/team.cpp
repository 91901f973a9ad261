// A team of threads for as long as a captured step runs. Its leader runs the step; the others wait for what kernels
// have to divide. A step of few rows is limited by reading weights, and between kernels there is much that one thread
// does alone. So the others, which know from the last run of the step what is read next, read that into their caches
// meanwhile. They load it: the processor's own prefetching follows loads, which it does not do for instructions that
// prefetch.
//
// The threads are OpenMP's, so that no core has two to run.
#include "../team.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <map>
#include <thread>
#include <vector>

struct GraphsrtJobs {
  std::map<const char*, int64_t> staying;  // begin and bytes of memory that stays
  std::vector<Stream> reads, ahead;        // of each job; and what of it may be read at any time

  // What the jobs have read this time.
  void learn(const std::vector<Stream>& now) {
    const auto same = [](const Stream& a, const Stream& b) { return a.begin == b.begin && a.bytes == b.bytes; };
    if (std::equal(now.begin(), now.end(), reads.begin(), reads.end(), same)) return;
    reads = ahead = now;
    for (Stream& read : ahead)
      if (!stays(read)) read = {};
  }

 private:
  bool stays(const Stream& read) const {
    const char* begin = static_cast<const char*>(read.begin);
    const auto after = staying.upper_bound(begin);
    if (after == staying.begin()) return false;
    const auto& [from, bytes] = *std::prev(after);
    return begin + read.bytes <= from + bytes;
  }
};

namespace {

constexpr int64_t LINE = 64, AT_ONCE = 16 * LINE;

// What a thread reads before its turn: half of its second cache, as a job reads other things as well.
int64_t most_ahead() {
#ifdef _SC_LEVEL2_CACHE_SIZE
  const long size = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (size > 0) return size / 2;
#endif
  return 1 << 17;
}

// Waits a moment: busily at first, and then so that whoever else wants the core gets it.
class Patience {
 public:
  void wait() {
    if (++waited_ > 4000) return std::this_thread::yield();
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 private:
  int64_t waited_ = 0;
};

// What one of the threads reads before its turn: its parts of the jobs to come.
class Ahead {
 public:
  Ahead(const std::vector<Stream>& jobs, int64_t thread, int64_t size) : jobs_(jobs), thread_(thread), size_(size) {
    go_to(0);
  }

  // So many jobs are done.
  void done(size_t jobs) {
    for (; done_ < std::min(jobs, jobs_.size()); ++done_)
      if (done_ < job_) waiting_ -= part(done_);
    if (job_ < done_) go_to(done_);
  }

  // Reads a little; false if there is nothing to read.
  bool read() {
    static const int64_t most = most_ahead();
    while (at_ == stop_) {
      if (job_ >= jobs_.size()) return false;
      waiting_ += part(job_);
      go_to(job_ + 1);
    }
    if (waiting_ + (at_ - start_) >= most) return false;
    for (int64_t i = 0; i < AT_ONCE; i += LINE) static_cast<void>(*static_cast<const volatile char*>(at_ + i));
    at_ += AT_ONCE;
    return true;
  }

 private:
  int64_t part(size_t job) const { return jobs_[job].bytes / size_ / AT_ONCE * AT_ONCE; }

  void go_to(size_t job) {
    job_ = job;
    start_ = at_ = stop_ = nullptr;
    if (job >= jobs_.size()) return;
    start_ = at_ = static_cast<const char*>(jobs_[job].begin) + jobs_[job].bytes * thread_ / size_;
    stop_ = at_ + part(job);
  }

  const std::vector<Stream>& jobs_;
  const int64_t thread_, size_;
  size_t done_ = 0, job_ = 0;  // what is read is job_'s
  int64_t waiting_ = 0;        // bytes of jobs that are neither done nor job_
  const char *start_, *at_, *stop_;
};

class Team {
 public:
  Team(int64_t size, GraphsrtJobs& jobs) : size_(size), jobs_(jobs) { reads_.reserve(jobs.reads.size()); }
  ~Team() { jobs_.learn(reads_); }

  int64_t size() const { return size_; }

  // Whoever has not come by the time this thread returns from the job finds it closed.
  void run(void (*job)(const void*, int64_t), const void* context, Stream read) {
    reads_.push_back(read);
    job_ = {job, context};
    const auto number = static_cast<int64_t>(reads_.size());
    open_.store(number, std::memory_order_release);
    perform(0);
    open_.store(-number);
    for (Patience patience; inside_.load();) patience.wait();
    if (failed_.exchange(false)) std::rethrow_exception(failure_);
  }

  // What the others do until the end.
  void serve(int64_t w) {
    Ahead ahead(jobs_.ahead, w, size_);
    Patience patience;
    for (int64_t seen = 0;;) {
      const int64_t number = open_.load(std::memory_order_acquire);
      if (number == OVER) return;
      if (number > seen) {
        inside_.fetch_add(1);
        if (open_.load() == number) perform(w);
        inside_.fetch_sub(1);
        ahead.done(static_cast<size_t>(seen = number));
        patience = {};
      } else if (!ahead.read()) {
        patience.wait();
      }
    }
  }

  void end() { open_.store(OVER, std::memory_order_release); }

 private:
  static constexpr int64_t OVER = std::numeric_limits<int64_t>::min();

  struct Job {
    void (*run)(const void*, int64_t);
    const void* context;
  };

  void perform(int64_t w) {
    try {
      job_.run(job_.context, w);
    } catch (...) {
      if (!failed_.exchange(true)) failure_ = std::current_exception();
    }
  }

  const int64_t size_;
  GraphsrtJobs& jobs_;
  std::vector<Stream> reads_;
  Job job_{};
  std::exception_ptr failure_;
  std::atomic<bool> failed_{false};
  alignas(LINE) std::atomic<int64_t> open_{0};  // the number of the job that may be joined; negative: it is closed
  alignas(LINE) std::atomic<int64_t> inside_{0};
};

thread_local Team* led = nullptr;

}  // namespace

extern "C" {

GraphsrtJobs* graphsrt_new_jobs() { return new GraphsrtJobs; }
void graphsrt_delete_jobs(GraphsrtJobs* jobs) { delete jobs; }

void graphsrt_jobs_stay(GraphsrtJobs* jobs, Stream memory) {
  int64_t& bytes = jobs->staying[static_cast<const char*>(memory.begin)];
  bytes = std::max(bytes, memory.bytes);
}

int64_t graphsrt_team_size() { return led ? led->size() : 0; }

void graphsrt_team_run(void (*job)(const void*, int64_t), const void* context, Stream read) {
  led->run(job, context, read);
}

void graphsrt_team_lead(int64_t threads, GraphsrtJobs* jobs, void (*body)(void*), void* context) {
  if (threads <= 1 || led || omp_in_parallel()) return body(context);
  Team team(threads, *jobs);
  std::exception_ptr failure;
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    if (omp_get_thread_num() > 0) {
      team.serve(omp_get_thread_num());
    } else {
      led = &team;
      try {
        body(context);
      } catch (...) {
        failure = std::current_exception();
      }
      led = nullptr;
      team.end();
    }
  }
  if (failure) std::rethrow_exception(failure);
}
}
