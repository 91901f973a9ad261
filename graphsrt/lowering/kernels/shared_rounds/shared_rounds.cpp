// Rounds of an exchange between processes that share memory: each rank puts its bytes down, says so, waits until all
// have, and reads what it needs. Every collective is one such round or two.
//
// Memory: a line of counters for each rank, then two sets of buffers, one buffer of `capacity` bytes for each rank in
// each. Rounds take the sets in turn. A rank that enters round r + 2 has seen all others enter r + 1, so they have
// read what was there in round r: no second wait is needed before a buffer is written again.
//
// Waiting: a short spin, then sleep in the kernel (futex), waking twenty times a second to see whether a peer has
// ended. Nothing in here has a name; the memory goes with the last process that maps it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/util/Half.h>

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t LINE = 64;
constexpr int64_t TILE = 2048;  // elements that are summed at a time: their sums stay in the first cache

struct alignas(LINE) Counters {
  std::atomic<uint32_t> round;     // rounds that the rank has entered
  std::atomic<uint32_t> sleepers;  // peers that sleep until it enters the next
  std::atomic<uint32_t> left;      // the rank has given up: whoever waits for it need not
};
static_assert(sizeof(Counters) == LINE && std::atomic<uint32_t>::is_always_lock_free);

enum DType : int64_t { kFloat = 0, kDouble = 1, kBFloat16 = 2, kHalf = 3 };

struct Group {
  char* memory;
  int64_t rank, size, capacity;
  std::vector<int> peers;  // a pidfd for each rank; -1 for this one
  std::chrono::nanoseconds spin, timeout;
  uint32_t round = 0;

  Counters& counters(int64_t r) const { return reinterpret_cast<Counters*>(memory)[r]; }
  char* buffer(int64_t r) const { return memory + LINE * size + ((round % 2) * size + r) * capacity; }

  // This rank's bytes are in its buffer: say so, and wait until everybody's are.
  void enter() {
    Counters& mine = counters(rank);
    mine.round.store(round);
    if (mine.sleepers.load()) futex(mine.round, FUTEX_WAKE, INT32_MAX, nullptr);
    const auto start = Clock::now();
    for (int64_t r = 0; r < size; ++r)
      if (r != rank) wait_for(r, start);
  }

  void wait_for(int64_t r, Clock::time_point start) {
    Counters& theirs = counters(r);
    int tries = 0;
    while (behind(theirs.round.load())) {
      if (++tries % 64 || Clock::now() - start < spin) {
        pause();
        continue;
      }
      sleep(r, start);
    }
  }

  void sleep(int64_t r, Clock::time_point start) {
    Counters& theirs = counters(r);
    theirs.sleepers.fetch_add(1);
    const uint32_t seen = theirs.round.load();
    // The kernel compares once more before it sleeps, so an entry between these lines is not missed.
    const timespec nap{0, 50'000'000};
    if (behind(seen)) futex(theirs.round, FUTEX_WAIT, seen, &nap);
    theirs.sleepers.fetch_sub(1);
    if (!behind(theirs.round.load())) return;
    const std::string who = "rank " + std::to_string(r);
    if (theirs.left.load()) throw std::runtime_error(who + " has left the group");
    pollfd peer{peers[r], POLLIN, 0};
    if (poll(&peer, 1, 0) > 0) throw std::runtime_error(who + " has ended");
    if (Clock::now() - start > timeout)
      throw std::runtime_error(who + " did not come within " +
                               std::to_string(std::chrono::duration_cast<std::chrono::seconds>(timeout).count()) + " s");
  }

  // Rounds are counted in 32 bits and wrap around.
  bool behind(uint32_t theirs) const { return static_cast<int32_t>(theirs - round) < 0; }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // Not FUTEX_PRIVATE: the processes have the word at different addresses.
  static long futex(std::atomic<uint32_t>& word, int what, uint32_t value, const timespec* wait) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), what, value, wait, nullptr, 0);
  }

  void leave() {
    counters(rank).left.store(1);
    futex(counters(rank).round, FUTEX_WAKE, INT32_MAX, nullptr);
  }
};

inline float widen(uint16_t bits) {  // bfloat16
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}

inline uint16_t narrow(float number) {  // to the nearest, ties to even; NaN is one NaN
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

struct Bf16 {
  using Sum = float;
  uint16_t bits;
  static float up(Bf16 x) { return widen(x.bits); }
  static Bf16 down(float x) { return {narrow(x)}; }
};
struct Fp16 {
  using Sum = float;
  c10::Half value;
  static float up(Fp16 x) { return static_cast<float>(x.value); }
  static Fp16 down(float x) { return {c10::Half(x)}; }
};
template <class T>
struct Plain {
  using Sum = T;
  T value;
  static T up(Plain x) { return x.value; }
  static Plain down(T x) { return {x}; }
};

// out[i] = rows[0][i] + rows[1][i] + …, or their maximum, in the order of ranks; NaN of any is NaN.
template <class E>
void combine(const std::vector<const char*>& rows, char* out, int64_t count, bool maximum) {
  using Sum = typename E::Sum;
  Sum total[TILE];
  for (int64_t begin = 0; begin < count; begin += TILE) {
    const int64_t n = std::min(TILE, count - begin);
    for (size_t r = 0; r < rows.size(); ++r) {
      const E* row = reinterpret_cast<const E*>(rows[r]) + begin;
      if (r == 0) {
        for (int64_t i = 0; i < n; ++i) total[i] = E::up(row[i]);
      } else if (!maximum) {
        for (int64_t i = 0; i < n; ++i) total[i] += E::up(row[i]);
      } else {
        for (int64_t i = 0; i < n; ++i) {
          const Sum x = E::up(row[i]);
          total[i] = total[i] > x || total[i] != total[i] ? total[i] : x;
        }
      }
    }
    E* target = reinterpret_cast<E*>(out) + begin;
    for (int64_t i = 0; i < n; ++i) target[i] = E::down(total[i]);
  }
}

void combine(int64_t dtype, const std::vector<const char*>& rows, char* out, int64_t count, bool maximum) {
  switch (dtype) {
    case kFloat: return combine<Plain<float>>(rows, out, count, maximum);
    case kDouble: return combine<Plain<double>>(rows, out, count, maximum);
    case kBFloat16: return combine<Bf16>(rows, out, count, maximum);
    default: return combine<Fp16>(rows, out, count, maximum);
  }
}

int64_t width(int64_t dtype) { return dtype == kDouble ? 8 : dtype == kFloat ? 4 : 2; }

std::vector<const char*> rows_of(const Group& g, int64_t offset) {
  std::vector<const char*> rows(g.size);
  for (int64_t r = 0; r < g.size; ++r) rows[r] = g.buffer(r) + offset;
  return rows;
}

// out[r] = what rank r gave, `bytes` of each.
void gather(Group& g, const char* in, char* out, int64_t bytes) {
  for (int64_t begin = 0; begin < bytes; begin += g.capacity) {
    const int64_t n = std::min(g.capacity, bytes - begin);
    ++g.round;
    std::memcpy(g.buffer(g.rank), in + begin, n);
    g.enter();
    for (int64_t r = 0; r < g.size; ++r) std::memcpy(out + r * bytes + begin, g.buffer(r), n);
  }
}

// Sum or maximum over ranks. Few bytes: every rank adds up everything. More: each its share, then all collect.
void all_reduce(Group& g, const char* in, char* out, int64_t count, int64_t dtype, bool maximum, int64_t one_round) {
  const int64_t w = width(dtype), most = g.capacity / w;
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t n = std::min(most, count - begin);
    ++g.round;
    std::memcpy(g.buffer(g.rank), in + begin * w, n * w);
    g.enter();
    if (g.size == 2 || n * w <= one_round || n < g.size) {
      combine(dtype, rows_of(g, 0), out + begin * w, n, maximum);
      continue;
    }
    const int64_t share = (n + g.size - 1) / g.size;
    const auto mine = [&](int64_t r) { return std::min(n, (r + 1) * share) - std::min(n, r * share); };
    const std::vector<const char*> rows = rows_of(g, std::min(n, g.rank * share) * w);
    ++g.round;  // the other set of buffers takes the shares; each at the start of its rank's buffer
    combine(dtype, rows, g.buffer(g.rank), mine(g.rank), maximum);
    g.enter();
    for (int64_t r = 0; r < g.size; ++r)
      std::memcpy(out + (begin + std::min(n, r * share)) * w, g.buffer(r), mine(r) * w);
  }
}

// This rank's block, of `size` of `count` elements each, of the sum or maximum over ranks.
void reduce_scatter(Group& g, const char* in, char* out, int64_t count, int64_t dtype, bool maximum) {
  const int64_t w = width(dtype), most = std::max<int64_t>(1, g.capacity / w / g.size);
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t n = std::min(most, count - begin);
    ++g.round;
    for (int64_t r = 0; r < g.size; ++r)
      std::memcpy(g.buffer(g.rank) + r * n * w, in + (r * count + begin) * w, n * w);
    g.enter();
    combine(dtype, rows_of(g, g.rank * n * w), out + begin * w, n, maximum);
  }
}

// Block r of each rank goes to rank r; row s of the result came from rank s. Blocks of `bytes`.
void exchange(Group& g, const char* in, char* out, int64_t bytes) {
  const int64_t most = std::max<int64_t>(1, g.capacity / g.size);
  for (int64_t begin = 0; begin < bytes; begin += most) {
    const int64_t n = std::min(most, bytes - begin);
    ++g.round;
    for (int64_t r = 0; r < g.size; ++r) std::memcpy(g.buffer(g.rank) + r * n, in + r * bytes + begin, n);
    g.enter();
    for (int64_t r = 0; r < g.size; ++r) std::memcpy(out + r * bytes + begin, g.buffer(r) + g.rank * n, n);
  }
}

// -- Python -----------------------------------------------------------------------------------------------------------

const char* NAME = "graphsrt.shared_rounds.group";

Group* group_of(PyObject* capsule) { return static_cast<Group*>(PyCapsule_GetPointer(capsule, NAME)); }

// The interpreter is let go while a rank waits; a peer that is gone comes back as RuntimeError.
template <class F>
PyObject* guarded(F&& f) {
  std::string message;
  PyThreadState* state = PyEval_SaveThread();
  try {
    f();
  } catch (const std::exception& e) {
    message = e.what();
  }
  PyEval_RestoreThread(state);
  if (!message.empty()) {
    PyErr_SetString(PyExc_RuntimeError, message.c_str());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// join(address, rank, size, capacity, pidfds, spin in s, timeout in s) -> group
PyObject* py_join(PyObject*, PyObject* args) {
  unsigned long long address;
  long long rank, size, capacity;
  PyObject* pidfds;
  double spin, timeout;
  if (!PyArg_ParseTuple(args, "KLLLO!dd", &address, &rank, &size, &capacity, &PyTuple_Type, &pidfds, &spin, &timeout))
    return nullptr;
  auto g = std::make_unique<Group>();
  g->memory = reinterpret_cast<char*>(address);
  g->rank = rank, g->size = size, g->capacity = capacity;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pidfds); ++i)
    g->peers.push_back(static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(pidfds, i))));
  if (PyErr_Occurred()) return nullptr;
  g->spin = std::chrono::nanoseconds(static_cast<int64_t>(spin * 1e9));
  g->timeout = std::chrono::nanoseconds(static_cast<int64_t>(timeout * 1e9));
  return PyCapsule_New(g.release(), NAME, [](PyObject* capsule) { delete group_of(capsule); });
}

struct Reader {
  PyObject* const* args;
  int64_t integer() { return PyLong_AsLongLong(*args++); }
  char* pointer() { return static_cast<char*>(PyLong_AsVoidPtr(*args++)); }
};

template <class F>
PyObject* with_group(PyObject* const* args, Py_ssize_t n, Py_ssize_t expected, F&& f) {
  if (n != expected) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected %zd", n, expected);
  Group* g = group_of(args[0]);
  if (!g) return nullptr;
  Reader r{args + 1};
  return f(*g, r);
}

PyObject* py_gather(PyObject*, PyObject* const* args, Py_ssize_t n) {
  return with_group(args, n, 4, [](Group& g, Reader& r) {
    const char* in = r.pointer();
    char* out = r.pointer();
    const int64_t bytes = r.integer();
    return PyErr_Occurred() ? nullptr : guarded([&] { gather(g, in, out, bytes); });
  });
}

PyObject* py_exchange(PyObject*, PyObject* const* args, Py_ssize_t n) {
  return with_group(args, n, 4, [](Group& g, Reader& r) {
    const char* in = r.pointer();
    char* out = r.pointer();
    const int64_t bytes = r.integer();
    return PyErr_Occurred() ? nullptr : guarded([&] { exchange(g, in, out, bytes); });
  });
}

PyObject* py_all_reduce(PyObject*, PyObject* const* args, Py_ssize_t n) {
  return with_group(args, n, 7, [](Group& g, Reader& r) {
    const char* in = r.pointer();
    char* out = r.pointer();
    const int64_t count = r.integer(), dtype = r.integer(), maximum = r.integer(), one_round = r.integer();
    return PyErr_Occurred() ? nullptr : guarded([&] { all_reduce(g, in, out, count, dtype, maximum, one_round); });
  });
}

PyObject* py_reduce_scatter(PyObject*, PyObject* const* args, Py_ssize_t n) {
  return with_group(args, n, 6, [](Group& g, Reader& r) {
    const char* in = r.pointer();
    char* out = r.pointer();
    const int64_t count = r.integer(), dtype = r.integer(), maximum = r.integer();
    return PyErr_Occurred() ? nullptr : guarded([&] { reduce_scatter(g, in, out, count, dtype, maximum); });
  });
}

PyObject* py_leave(PyObject*, PyObject* capsule) {
  Group* g = group_of(capsule);
  if (!g) return nullptr;
  g->leave();
  Py_RETURN_NONE;
}

template <class F>
PyCFunction fast(F f) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f)); }

PyMethodDef methods[] = {
    {"join", py_join, METH_VARARGS, nullptr},
    {"gather", fast(py_gather), METH_FASTCALL, nullptr},
    {"exchange", fast(py_exchange), METH_FASTCALL, nullptr},
    {"all_reduce", fast(py_all_reduce), METH_FASTCALL, nullptr},
    {"reduce_scatter", fast(py_reduce_scatter), METH_FASTCALL, nullptr},
    {"leave", py_leave, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "shared_rounds", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_shared_rounds() { return PyModule_Create(&module_def); }
