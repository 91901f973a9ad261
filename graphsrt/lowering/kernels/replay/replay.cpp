// Replays a captured step: compiled regions and kernels, one after the other, over slots that hold the step's values.
//
// lowering/launches.py does the same, launch by launch. By the time of a launch the weights have pushed out of the
// caches what the interpreter needs for it, so that Python takes as long as a small kernel; here it is a few lines.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../team.h"

namespace {

// ---- a compiled region ---------------------------------------------------------------------------------------------

// A library of AOTInductor. Its functions are those of torch/csrc/inductor/aoti_runtime/interface.h.
class Library {
 public:
  explicit Library(const std::string& path) : path_(path), library_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!library_) throw std::runtime_error(std::string("a compiled region cannot be loaded: ") + dlerror());
    find(run_, "AOTInductorModelContainerRunSingleThreaded");
    find(delete_, "AOTInductorModelContainerDelete");
    int32_t (*create)(void**, size_t, const char*, const char*);
    find(create, "AOTInductorModelContainerCreateWithDevice");
    check(create(&container_, 1, "cpu", nullptr));
  }
  ~Library() {
    if (container_) delete_(container_);
    dlclose(library_);
  }
  Library(const Library&) = delete;

  // The inputs are given away.
  void run(std::vector<AtenTensorHandle>& inputs, std::vector<AtenTensorHandle>& outputs) const {
    check(run_(container_, inputs.data(), inputs.size(), outputs.data(), outputs.size(), nullptr, nullptr));
  }

 private:
  template <class F>
  void find(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(library_, name));
    if (!function) throw std::runtime_error(path_ + " has no function " + name);
  }
  void check(int32_t status) const {
    if (status) throw std::runtime_error("the compiled region " + path_ + " failed; standard error says why");
  }

  std::string path_;
  void* library_;
  void* container_ = nullptr;
  int32_t (*run_)(void*, AtenTensorHandle*, size_t, AtenTensorHandle*, size_t, void*, void*);
  int32_t (*delete_)(void*);
};

// ---- values --------------------------------------------------------------------------------------------------------

void check_tensor(AOTITorchError status) {
  if (status) throw std::runtime_error("torch could not make a tensor");
}

// A tensor, held as one more of its references.
class Value {
 public:
  Value() = default;
  explicit Value(AtenTensorHandle taken) : handle_(taken) {}
  Value(Value&& other) noexcept : handle_(other.give()) {}
  Value& operator=(Value&& other) noexcept {
    reset(other.give());
    return *this;
  }
  ~Value() { reset(nullptr); }

  AtenTensorHandle another() const {
    if (!handle_) throw std::logic_error("a value is read that is not there");
    AtenTensorHandle made;
    check_tensor(aoti_torch_new_tensor_handle(handle_, &made));
    return made;
  }
  void* data() const {
    if (!handle_) throw std::logic_error("a value is read that is not there");
    void* address;
    check_tensor(aoti_torch_get_data_ptr(handle_, &address));
    return address;
  }
  // Of a contiguous tensor.
  int64_t bytes() const {
    int64_t count;
    int32_t dtype;
    check_tensor(aoti_torch_get_numel(handle_, &count));
    check_tensor(aoti_torch_get_dtype(handle_, &dtype));
    return count * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  }
  AtenTensorHandle give() {
    AtenTensorHandle given = handle_;
    handle_ = nullptr;
    return given;
  }
  void reset(AtenTensorHandle taken) {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
    handle_ = taken;
  }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// ---- a step --------------------------------------------------------------------------------------------------------

using Slots = std::vector<int64_t>;

// What is called with the addresses of its inputs; `bound` has all else, the result's address as well.
using Kernel = void (*)(const void* bound, void* const* inputs);

struct Launch {
  const Library* region;  // or null:
  Kernel kernel;
  const void* bound;
  Slots inputs, outputs;  // of a kernel there are none: its result is pinned
  std::vector<Value> weights;
  Slots done;             // what nobody reads after it
};

struct Step {
  std::vector<Value> slots;
  std::vector<bool> pinned;  // the same tensor in each replay
  std::map<std::string, std::unique_ptr<Library>> libraries;
  std::vector<Launch> launches;
  std::unique_ptr<GraphsrtJobs, void (*)(GraphsrtJobs*)> jobs{graphsrt_new_jobs(), graphsrt_delete_jobs};

  const Library* library(const std::string& path) {
    auto& found = libraries[path];
    if (!found) found = std::make_unique<Library>(path);
    return found.get();
  }

  void replay() {
    std::vector<AtenTensorHandle> given, made;
    std::vector<void*> addresses;
    for (const Launch& launch : launches) {
      if (launch.region) {
        given.clear();
        for (int64_t slot : launch.inputs) given.push_back(slots[slot].another());
        for (const Value& weight : launch.weights) given.push_back(weight.another());
        made.assign(launch.outputs.size(), nullptr);
        launch.region->run(given, made);
        for (size_t i = 0; i < made.size(); ++i) slots[launch.outputs[i]].reset(made[i]);
      } else {
        addresses.clear();
        for (int64_t slot : launch.inputs) addresses.push_back(slots[slot].data());
        launch.kernel(launch.bound, addresses.data());
      }
      for (int64_t slot : launch.done)
        if (!pinned[slot]) slots[slot].reset(nullptr);
    }
  }

  AtenTensorHandle result(int64_t slot) { return pinned[slot] ? slots[slot].another() : slots[slot].give(); }
};

// ---- what Python calls ---------------------------------------------------------------------------------------------

struct PythonError {};  // it is set already

int64_t integer(PyObject* x) {
  const int64_t value = PyLong_AsLongLong(x);
  if (PyErr_Occurred()) throw PythonError();
  return value;
}

// As torch._C._aoti gives a tensor away.
Value value(PyObject* capsule) {
  void* handle = PyCapsule_GetPointer(capsule, nullptr);
  if (!handle) throw PythonError();
  return Value(static_cast<AtenTensorHandle>(handle));
}

constexpr const char* NAME = "graphsrt.replay";

Step& step(PyObject* capsule) {
  void* found = PyCapsule_GetPointer(capsule, NAME);
  if (!found) throw PythonError();
  return *static_cast<Step*>(found);
}

Slots slots_of(const Step& of, PyObject* list) {
  Slots slots;
  for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) slots.push_back(integer(PyList_GetItem(list, i)));
  if (PyErr_Occurred()) throw PythonError();
  for (int64_t slot : slots)
    if (slot < 0 || slot >= static_cast<int64_t>(of.slots.size())) throw std::out_of_range("there is no such slot");
  return slots;
}

template <class F>
PyObject* guarded(Py_ssize_t given, Py_ssize_t wanted, F&& f) {
  if (given != wanted) return PyErr_Format(PyExc_TypeError, "replay: %zd arguments, %zd are wanted", given, wanted);
  try {
    return f();
  } catch (const PythonError&) {
  } catch (const std::invalid_argument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

// new_step(number of slots)
PyObject* py_new_step(PyObject*, PyObject* const* args, Py_ssize_t n) {
  return guarded(n, 1, [&] {
    auto made = std::make_unique<Step>();
    made->slots.resize(integer(args[0]));
    made->pinned.resize(made->slots.size());
    const auto destroy = [](PyObject* capsule) { delete static_cast<Step*>(PyCapsule_GetPointer(capsule, NAME)); };
    return PyCapsule_New(made.release(), NAME, destroy);
  });
}

// pin(step, slot, tensor): what the slot holds in all replays
PyObject* py_pin(PyObject*, PyObject* const* args, Py_ssize_t n) {
  return guarded(n, 3, [&] {
    const int64_t slot = integer(args[1]);
    step(args[0]).slots.at(slot) = value(args[2]);
    step(args[0]).pinned.at(slot) = true;
    Py_RETURN_NONE;
  });
}

// add_region(step, path, inputs, weights, outputs, done)
PyObject* py_add_region(PyObject*, PyObject* const* args, Py_ssize_t n) {
  return guarded(n, 6, [&] {
    const char* path = PyUnicode_AsUTF8(args[1]);
    if (!path) throw PythonError();
    Step& to = step(args[0]);
    Launch launch{to.library(path), nullptr, nullptr, slots_of(to, args[2]), slots_of(to, args[4]), {}, {}};
    for (Py_ssize_t i = 0; i < PyList_Size(args[3]); ++i) {
      launch.weights.push_back(value(PyList_GetItem(args[3], i)));
      graphsrt_jobs_stay(to.jobs.get(), {launch.weights.back().data(), launch.weights.back().bytes()});
    }
    launch.done = slots_of(to, args[5]);
    to.launches.push_back(std::move(launch));
    Py_RETURN_NONE;
  });
}

// add_kernel(step, address of the function, address of what is bound, inputs, done)
PyObject* py_add_kernel(PyObject*, PyObject* const* args, Py_ssize_t n) {
  return guarded(n, 5, [&] {
    const auto function = reinterpret_cast<Kernel>(integer(args[1]));
    const auto* bound = reinterpret_cast<const void*>(integer(args[2]));
    Step& to = step(args[0]);
    to.launches.push_back({nullptr, function, bound, slots_of(to, args[3]), {}, {}, slots_of(to, args[4])});
    Py_RETURN_NONE;
  });
}

// replay(step, slots, threads of a team): what the slots hold after it. The interpreter is let go meanwhile.
PyObject* py_replay(PyObject*, PyObject* const* args, Py_ssize_t n) {
  return guarded(n, 3, [&]() -> PyObject* {
    Step& replayed = step(args[0]);
    const Slots results = slots_of(replayed, args[1]);
    const int64_t threads = integer(args[2]);
    PyThreadState* state = PyEval_SaveThread();
    try {
      const auto body = [](void* of) { static_cast<Step*>(of)->replay(); };
      graphsrt_team_lead(threads, replayed.jobs.get(), body, &replayed);
    } catch (...) {
      PyEval_RestoreThread(state);
      throw;
    }
    PyEval_RestoreThread(state);
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(results.size()));
    if (!list) throw PythonError();
    for (size_t i = 0; i < results.size(); ++i)
      PyList_SetItem(list, static_cast<Py_ssize_t>(i), PyCapsule_New(replayed.result(results[i]), nullptr, nullptr));
    return list;
  });
}

template <class F>
constexpr PyMethodDef method(const char* name, F function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {method("new_step", py_new_step), method("pin", py_pin), method("add_region", py_add_region),
                         method("add_kernel", py_add_kernel), method("replay", py_replay),
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "replay", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_replay() { return PyModule_Create(&module_def); }
