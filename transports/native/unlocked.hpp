// Letting go of the GIL while C++ works, also in a thread that the interpreter's end overtakes.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace kvrdma {

// Without the GIL for its lifetime.
//
// Python kills a thread that asks for the GIL once the interpreter has begun to end (before 3.14), and C++ frames do
// not survive that: the process would abort. Such a thread stays here instead, until the process is gone.
class Unlocked {
  public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    ~Unlocked() { take_back(state_); }
    Unlocked(const Unlocked &) = delete;
    Unlocked &operator=(const Unlocked &) = delete;

  private:
    struct StayWhenKilled {
        bool killed = true;
        ~StayWhenKilled() {
            while (killed)
                pause();
        }
    };

    // Not inlined: in a destructor, which must not throw, being killed would end the process before anything else.
    [[gnu::noinline]] static void take_back(PyThreadState *state) {
        StayWhenKilled stay;
        PyEval_RestoreThread(state);
        stay.killed = false;
    }

    PyThreadState *state_;
};

} // namespace kvrdma
